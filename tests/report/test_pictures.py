"""Which pictures a finished run leaves in its folder."""

import pytest

import coterie
from coterie.data import churn
from coterie.models import model
from coterie.report.pictures import draw


@pytest.mark.parametrize(("method", "later", "drawn"), [
    ("fedavg", False, ["picture", "clients", "conflicts"]),
    ("local", False, ["picture", "clients"]),  # nothing is uploaded, so nothing conflicts
    ("fedavg", True, ["picture", "clients", "conflicts", "newcomers"]),
])
def test_there_is_a_picture_of_what_was_recorded(method, later, drawn, tiny, tmp_path):
    data = tiny.federation()
    data = churn.with_times(data, {data.names[-1]: (2, churn.NEVER)}) if later else data
    result = coterie.run(method, model("mlp", (tiny.FEATURES,), tiny.CLASSES, hidden=5), data, rounds=4, batch=3,
                         precision="float64", device="cpu", evaluate_every=1)
    found = draw([result], data, tmp_path)
    assert [path.stem for path in found] == drawn
    assert all(path.stat().st_size for path in found)
