"""Next tokens of a small table of texts, from the command line to the report; and what is not possible with them."""

import json

import numpy as np
import pytest
import torch

import coterie
from commands import invoke
from coterie import CoterieError, Federation
from coterie.contract.tokens import IGNORED

TEXTS = {
    "anna": ["the cat sat on the mat and ran away", "the dog sat on the log and ran away", "a cat is not a dog"],
    "bert": ["to be or not to be that is it", "whether it is nobler in the mind", "to die to sleep no more"],
    "carl": ["one two three four five six", "two three four five six one", "three four five six one two"],
}


@pytest.fixture(scope="module")
def plays(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "plays.csv"
    lines = [f"{role},{text}" for role, texts in TEXTS.items() for text in texts * 2]
    path.write_text("\n".join(["role,text", *lines]) + "\n")
    return path
