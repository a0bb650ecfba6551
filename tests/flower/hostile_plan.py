"""Which of `hostile.py`'s cases a hostile site sends over real processes: in which round, of which experiment."""

from __future__ import annotations

from hostile import Case, Raw

SITE = "oslo"
FACTS = [
    Case("n", "overflow"), Case("scores", "object"), Case("n", "negative"), Case("layout", "list"),
    Case("site", "text"),
]
CASES = {
    "fedavg": FACTS,
    "fedfew": [Case("loss", form) for form in ("far off", "negative", "nan", "wrong shape", "empty")],
    "fedfomo": [Case("who", "far off"), Case("omega", "far off"), Case("row", "long"), Case("who", "negative"),
                Case("omega", "inf")],
    "ifca": [Case("choice", "far off"), Case("choice", "wrong type"), Case("update", "claimed size"),
             Case("choice", "missing"), Case("update", "zipped")],
    "fedpac": [Case("V", "negative"), Case("features", "long"), Case("counts", "doubled"), Case("H", "fifty"),
               Case("head", "pickled")],
    "fednh": [Case("means", "far off"), Case("counts", "negative"), Case("update", "columns first"),
              Case("counts", "far off"), Case("update", "huge")],
    "fedsoft": [Case("u", "negative"), Case("u", "far off"), Case("offset", "deep"), Case("u", "no client axis"),
                Case("offset", "more bytes")],
    "scaffold": [Case("control", "nan"), Case("control", "long"), Case("update", "digits"), Case("more", "extra"),
                 Case("control", "nothing")],
}
"""By experiment, one case a round; 40 in all."""
WHOLE = [Case("superscript", "message"), Case("deep", "message"), Case("5000 digits", "message")]
"""Of the whole message, in the rounds after those."""
ROUNDS = len(FACTS) + len(WHOLE)


def spoiled(content, parcels):
    """What the hostile site sends in place of an answer."""
    raw, t = Raw.apart(content), None
    for number, parcel in enumerate(parcels):
        if parcel.meta.get("kind") == "round" and "n" in parcel.meta:
            t = parcel.meta["round"]
            if t < len(FACTS):
                raw = CASES[parcel.meta["experiment"]][t].spoiled(raw, number)
    if t is not None and t >= len(FACTS):
        raw = WHOLE[t - len(FACTS)].spoiled(raw)
    return raw.records()
