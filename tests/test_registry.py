"""Spellings of methods."""

from commands import FILES

from coterie import registry


def test_expand_puts_every_method_in_place_of_all_and_repeats_none():
    assert registry.expand(["all"]) == tuple(FILES)
    rest = tuple(name for name in FILES if name != "fedper")
    assert registry.expand(["fedper", "all"]) == ("fedper", *rest)  # what is named first stays first
    assert registry.expand(["all", "fedper", "fedper:personal=none"]) == (*FILES, "fedper:personal=none")
    assert registry.expand(["all", "All"]) == tuple(FILES)


def test_expand_leaves_spellings_alone():
    assert registry.expand(["mine.py:All", "fedavg+confree", "fedavg"]) == ("mine.py:All", "fedavg+confree", "fedavg")
    assert registry.expand(["ifca", "ifca"]) == ("ifca",)
    assert registry.expand([]) == ()
