"""Chat templates in the manner of well-known models, and a tokenizer that knows their special tokens.

One token a character, so that columns of tokens can be read; special tokens are whole.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "[INST]", "[/INST]"]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 <>/_\n"

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Trims contents; the end token stands at once after them.
LLAMA3 = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|header|>' + m['role'] + '<|/header|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
# Thoughts stand in a turn only as long as no user speaks after it; without one an empty thought is written.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% set parts = m['content'].split('</think>') %}{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + (parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '') }}"
    "{{ '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].lstrip('\n') + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# No head before an answer; the system's words are merged into the last turn of the user.
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for m in rest %}{% if m['role'] == 'user' %}"
    "{% if loop.revindex0 <= 1 and system is defined and (loop.last or loop.revindex0 == 1) %}"
    "{{ '[INST]' + system + '\n\n' + m['content'] + '[/INST]' }}{% else %}{{ '[INST]' + m['content'] + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# ChatML whose answers are marked, the end token inside; MARKED_SHORT leaves the end token out.
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_SHORT = MARKED.replace(
    "+ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}", "}}{% endgeneration %}{{ '<|im_end|>\n' }}"
)
# What a model is sampled with begins its thought. R1 drops thoughts from all turns, so no turn begins like that.
THINKING = QWEN3.replace(
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}",
    ("{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"),
)
R1 = CHATML.replace("m['content'] +", "m['content'].split('</think>')[-1] +").replace(
    "'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n<think>\n' }}"
)
# A system prompt of its own, and <s> before everything.
DEFAULT_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nz<|im_end|>\n' }}{% endif %}"
    + CHATML
)
# Nothing ends a turn.
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def chat_tokenizer(template, *, merges=()):
    """<unk> 0, <s> 1, </s> 2, the special tokens, the characters; `merges` become one token, such as "\\n\\n"."""
    names = ["<unk>", "<s>", "</s>", *SPECIAL, *CHARACTERS, *merges]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    pattern = "|".join([*merges, r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer
