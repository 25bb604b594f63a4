"""Tokens of texts, with the tokens that begin and end a text exactly once."""

from transformers import PreTrainedTokenizerBase


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a whole text.

    A text that already begins with the tokenizer's first token does not get a second.
    """
    ids = tokenizer(text).input_ids
    first = tokenizer.bos_token_id
    is_twice = first is not None and ids[:2] == [first, first]
    if is_twice and text.startswith(str(tokenizer.bos_token)):
        return ids[1:]
    return ids


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text that goes on: without the one that ends each text.

    Some tokenizers add that token to every text. If the text itself ends with the
    token, it stays.
    """
    ids, last = text_ids(tokenizer, text), tokenizer.eos_token_id
    own = tokenizer(text, add_special_tokens=False).input_ids
    is_added = ids[-len(own) - 1 :] == [*own, last]
    return ids[:-1] if is_added else ids
