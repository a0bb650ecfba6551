"""A tokenizer.json whose numbers are known by hand."""

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "play", "##ing", "chess", "we", "like", "##s"]
"""A word's number is its place: `playing` is play ##ing, 5 6."""


def tokenizer(path, words=tuple(WORDS), pad="[PAD]"):
    """WordPiece with [CLS] before a text and [SEP] behind it, as BERT's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    known = {word: k for k, word in enumerate(words)}
    made = Tokenizer(models.WordPiece(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([word for word in words if word.startswith("[")])
    both = [(name, known[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=both)
    made.save(str(path))
    return path
