"""Which round's models leave a run: a line below the table."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.errors import CoterieError
from coterie.evaluation.stages import SEEN
from coterie.running.chosen import CHOSEN, HandedOut
from coterie.running.folder import Folder
from coterie.running.result import Result

WHO = "`coterie export` and `coterie personalize` take"


def lines(results: Sequence[Result]) -> list[str]:
    """What export and personalize will take, for results that have a folder."""
    placed = [result for result in results if result.folder is not None and Folder(result.folder).checkpoint.is_file()]
    try:
        found = [_of(result) for result in placed]
    except CoterieError as reason:
        return [f"Models cannot be handed out: {reason}"]
    if len(found) == 1:
        return [_stated(*found[0])]
    if not found:
        return []
    pairs = zip(placed, found, strict=True)
    notes = [f"{result.method}, seed {result.seed}: {one.note}" for result, (taken, _) in pairs
             for one in taken if one.note]
    return [f"{WHO} the rounds of the table; with --round last, the last one.", *dict.fromkeys(notes)]


def _of(result: Result) -> tuple[list[HandedOut], int]:
    """Stage by stage, and the last round."""
    assert result.folder is not None
    kept = Folder(result.folder).kept()
    return [kept.hand_out(result.history, stage) for stage in SEEN if stage in result.stages], kept.last


def _stated(taken: Sequence[HandedOut], last: int) -> str:
    notes = list(dict.fromkeys(one.note for one in taken if one.note))
    rounds = {one.round for one in taken}
    if rounds == {last}:
        why = f", which was {CHOSEN}" if all(one.when == CHOSEN for one in taken) else ""
        return " ".join([f"{WHO} round {last}, the last one{why}.", *notes])
    each = " and ".join(f"round {one.round} ({one.stage})" for one in taken)
    each = f"round {taken[0].round}" if len(rounds) == 1 else each
    why = f", {CHOSEN}" if not notes else ""
    return " ".join([f"{WHO} {each}{why}; with --round last, round {last}.", *notes])
