"""Chat templates of the kinds that models bring, written for these tests."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HEADERS = (
    "{% set rest = messages %}{% for m in rest %}"
    "{% set text = '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|im_end|>' %}"
    "{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)

ALTERNATING = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant must alternate') }}"
    "{% endif %}{% if loop.index0 == 0 %}{{ system }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)

NEIGHBOURS = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are helpful.') }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<r>' + m.content + '</r>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif not (loop.first and tools and m.role == 'system') %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '\\n<c>' + (call | tojson) + '</c>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"""

PARTS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{{ messages[-1].role }}"

OLD_THOUGHTS_GO = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content if loop.index0 >= ns.last else m.content[:5]) + '<|im_end|>\\n' }}
{%- endfor %}"""

COUNTING = (
    "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>{% endif %}"
)

PLACES = "{% for m in messages %}{{ loop.index }}<|im_start|>{{ m.content }}{% endfor %}"

STATE = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "<|im_start|>{{ ns.n }}{{ m.content }}{% endfor %}"
)

ONE_BY_ONE = {
    "chatml": CHATML,
    "headers": HEADERS,
    "alternating": ALTERNATING,
    "parts": PARTS,
    "plain": PLAIN,
}
LOOKING_AHEAD = {"neighbours": NEIGHBOURS}
NOT = {"old thoughts go": OLD_THOUGHTS_GO, "counting": COUNTING, "places": PLACES, "state": STATE}
TEMPLATES = ONE_BY_ONE | LOOKING_AHEAD | NOT
