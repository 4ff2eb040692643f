"""Seeded multi-turn chat workloads: who says what, and when. Pure: same settings and seed, same conversations."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

_VOCABULARY = """
about above account across advice afternoon agree already answer apple around arrive autumn balance basket because
before behind believe better between beyond bicycle borrow bottle branch bread bridge bright bring brother build
butter calendar candle careful carry castle certain chair change cheese children choose circle city clean clear climb
clock coffee common compare complete corner cotton country cover cross curtain daily danger daughter decide deliver
desert diary different dinner distance doctor double dream during eager early earth east effort either empty engine
enough evening every example expect explain family famous farmer father feather fence field finger finish flower
follow forest forget forward fresh friend garden gather gentle glass golden grain green ground guess guitar happen
harbour heavy history holiday honest hotel hundred imagine inside island jacket journey kitchen ladder language large
later laugh leather lesson letter library light listen little lunch machine market meadow measure melody memory middle
minute mirror moment morning mother mountain music narrow nature nearly needle neighbour never north notice number
ocean office often orange order other outside paint paper parcel party people perhaps picture pilot planet plate
pleasant pocket potato prepare present promise quarter question quiet railway reach reason record remember repair
reply return river roof round sail salt sample school season second secret seven shadow shape share shelter shirt
silver simple sister sleep slowly small smile smooth soldier something south spoon spring station still stone story
straight street strong sugar summer supper surprise table teacher thank theatre thick thing thousand ticket tiger
today together tomorrow towards tower traffic travel treasure twelve under until upon valley village violin visit
voice wagon walk warm watch water weather welcome west wheel whole window winter without wonder wooden word world
write yellow yesterday young
"""
_WORDS = _VOCABULARY.split()


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message: sent `think_s` seconds after the previous answer ended, answered by `max_tokens` at most."""

    user: str
    max_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Script:
    """One conversation: `session` starts `start_s` seconds into the run and plays its turns in order."""

    session: int
    start_s: float
    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Settings of a chat workload. Ranges are inclusive and drawn from uniformly.

    Text is counted in characters, answers in tokens, time in seconds. Every session shares one system prompt of exactly
    `system_chars`; all other text is a session's own. Sessions start `stagger_s` apart on average (a Poisson process).
    """

    sessions: int = 32
    turns: int = 6
    system_chars: int = 4000
    user_chars: tuple[int, int] = (200, 800)
    answer_tokens: tuple[int, int] = (64, 192)
    stagger_s: float = 0.1
    think_s: tuple[float, float] = (0.2, 0.8)

    def __post_init__(self) -> None:
        if self.sessions < 1 or self.turns < 1:
            raise ValueError("a workload needs at least one session and one turn")
        if self.system_chars < 0 or self.stagger_s < 0:
            raise ValueError("system_chars and stagger_s can't be negative")
        for name in ("user_chars", "answer_tokens", "think_s"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise ValueError(f"{name} must be a range from low to high")

    def scripts(self, seed: int) -> tuple[Script, ...]:
        """Return the sessions in order of their start. A session's text doesn't depend on how many there are."""
        system = prose(Random(f"{seed} system"), self.system_chars)
        arrivals = Random(f"{seed} arrivals")
        start = 0.0
        scripts = []
        for session in range(self.sessions):
            scripts.append(self.script(seed, session, start_s=start, system=system))
            start += arrivals.expovariate(1 / self.stagger_s) if self.stagger_s else 0.0
        return tuple(scripts)

    def endless(self, seed: int) -> Iterator[Script]:
        """Yield sessions without end, none with a start time of its own: for a load that runs until it is stopped."""
        system = prose(Random(f"{seed} system"), self.system_chars)
        session = 0
        while True:
            yield self.script(seed, session, start_s=0.0, system=system)
            session += 1

    def script(self, seed: int, session: int, start_s: float, system: str) -> Script:
        random = Random(f"{seed} session {session}")
        turns = []
        for turn in range(self.turns):
            # The opening words differ in every message of a run, so that no two sessions can share blocks by chance.
            opening = f"On case {session + 1}, point {turn + 1}: "
            body = prose(random, max(0, random.randint(*self.user_chars) - len(opening)))
            think = random.uniform(*self.think_s) if turn else 0.0
            turns.append(Turn(opening + body, random.randint(*self.answer_tokens), think))
        return Script(session, start_s, system, tuple(turns))


def prose(random: Random, length: int) -> str:
    """Return exactly `length` characters of sentences drawn from a word list."""
    parts: list[str] = []
    written = 0
    while written <= length:
        words = random.choices(_WORDS, k=random.randint(5, 14))
        sentence = f"{' '.join(words).capitalize()}. "
        parts.append(sentence)
        written += len(sentence)
    text = "".join(parts)[:length]
    # A cut may leave a space at the end, which a chat template might strip: the length would no longer be exact.
    return f"{text[:-1]}." if text.endswith(" ") else text
