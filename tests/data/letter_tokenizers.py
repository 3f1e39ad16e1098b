"""Tokenizers built on the spot: one id a character, so that every expected id can be read off the text."""

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 +=?:\n"
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer(*, chat_template=None, adds="", eos="</s>"):
    """<unk> 0, <s> 1, </s> 2, a 3, b 4, c 5, ...; `adds` is what it puts around a text, such as "<s> $A"."""
    names = ["<unk>", "<s>", "</s>", *CHARACTERS]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    if adds:
        core.post_processor = processors.TemplateProcessing(single=adds, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token=eos)
    tokenizer.chat_template = chat_template
    return tokenizer


def make_chat_tokenizer():
    """Its template writes <s> itself, and the tokenizer would add a second one."""
    return make_tokenizer(chat_template=TEMPLATE, adds="<s> $A")
