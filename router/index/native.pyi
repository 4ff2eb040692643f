from router.index.residency import Held

def Runs(most: int = 32, /) -> Held: ...  # noqa: N802 - a class, of which it matters only what it makes
