"""Groups stay on one side: of a client's split, of made-up clients, and with sizes as near to the shares as can be."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data import SPLITS, Federation, groups, load, natural
from coterie.data.splits import held_out
from coterie.errors import CoterieError
from coterie.running.experiment import Experiment


def numbered(ids, **options):
    """A client for each array of ids; the features of a sample are its place among all samples and its client."""
    places = np.split(np.arange(sum(map(len, ids))), np.cumsum([len(one) for one in ids])[:-1])
    clients = [(np.stack([p, np.full(len(p), i)], 1).astype(np.float32), p % 2) for i, p in enumerate(places)]
    return Federation.from_clients(clients, group=ids, **options)


def sides(federation, ids):
    """The splits in which each group of each client has samples, by the samples themselves."""
    everyone = np.concatenate(ids)
    found = {}
    for i in range(federation.clients):
        for split in SPLITS:
            for place, client in federation.client(i, split)[0].tolist():
                found.setdefault((int(client), everyone[int(place)]), set()).add(split)
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=25), min_size=1, max_size=4), st.integers(0, 9),
       st.floats(0, 0.9), st.floats(0, 0.9))
def test_no_group_of_a_client_is_on_two_sides_and_no_sample_is_lost(drawn, seed, val, test):
    ids = [np.array([f"{i}-{k}" for k in one]) for i, one in enumerate(drawn)]
    federation = numbered(ids, seed=seed, val=val, test=test)
    assert all(len(where) == 1 for where in sides(federation, ids).values())
    assert sorted(federation.x[:, 0].tolist()) == list(range(sum(map(len, ids))))
    for i, one in enumerate(ids):
        assert federation.sizes("train")[i] > 0
        assert (federation.sizes("test")[i] > 0) == (len(set(one)) > 1 and test > 0)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.integers(1, 40))
def test_the_sizes_are_the_nearest_that_groups_allow(sizes, target):
    """Every set of groups that leaves one in training, tried one after another, says how near one can come."""
    taken = groups.nearest(sizes, target)
    some = [sum(c) for n in range(1, len(sizes)) for c in combinations(sizes, n)]
    assert 0 < taken.sum() < len(sizes)
    assert abs(np.array(sizes)[taken].sum() - target) == min(abs(total - target) for total in some)


def test_many_groups_come_as_near_as_single_samples_do():
    """Among 3,000 groups of 1 to 9 samples some add up to any number."""
    sizes = np.random.default_rng(0).integers(1, 10, 3000)
    ids = np.repeat(np.arange(3000), sizes)
    federation = numbered([ids])
    tested = held_out(len(ids), 0.25)
    wanted = [len(ids) - tested - held_out(len(ids) - tested, 0.1), held_out(len(ids) - tested, 0.1), tested]
    assert [int(federation.sizes(split)[0]) for split in SPLITS] == wanted
    assert all(len(where) == 1 for where in sides(federation, [ids]).values())


def test_the_split_follows_from_the_seed_and_not_from_the_order_of_the_rows():
    ids = np.repeat(np.arange(30), np.arange(30) % 4 + 1)
    turned = np.random.default_rng(1).permutation(len(ids))
    found = [numbered([ids], seed=1), numbered([ids[turned]], seed=1), numbered([ids], seed=2)]
    held = [{g for (_, g), where in sides(f, [i]).items() if where == {"test"}}
            for f, i in zip(found, ([ids], [ids[turned]], [ids]), strict=True) for i in i]
    assert held[0] == held[1]
    assert held[0] != held[2]
    assert numbered([ids], seed=1).fingerprint() == found[0].fingerprint()


def test_groups_of_one_sample_are_split_in_the_same_sizes_as_samples():
    plain, grouped = (numbered([np.arange(37)]), Federation.from_clients([(np.zeros((37, 1)), np.arange(37) % 2)]))
    assert plain.bounds.tolist() == grouped.bounds.tolist()


# --- groups at several clients ----------------------------------------------------------------------------------------


def test_a_group_at_several_clients_is_trained_on_alone_where_there_are_others():
    ids = [np.array([*"aabbccddeeff", "shared", "shared"]), np.array([*"gghhiijjkkll", "shared"])]
    federation = numbered(ids)
    assert {where for (_, g), w in sides(federation, ids).items() if g == "shared" for where in w} == {"train"}
    assert any("1 of 13 groups have samples at several clients, so they are for training alone" in note
               for note in federation.recipe["notes"])
    assert federation.recipe["split"]["groups"] == 13


def test_where_there_are_none_it_is_said_that_clients_share_them():
    ids = [np.repeat([0, 1, 2], 4)] * 2
    federation = numbered(ids)
    assert all(len(where) == 1 for where in sides(federation, ids).values())
    assert "3 of 3 groups have samples at several clients: each client keeps its own part" in (
        federation.recipe["notes"][0])


def test_a_client_with_one_group_holds_nothing_out_and_that_is_said():
    federation = numbered([np.array(["p"] * 6), np.array(list("qqqrrr"))])
    assert federation.sizes("test").tolist() == [0, 3]
    (said,) = federation.recipe["notes"]
    assert said == "1 client (0) with a single group, so nothing is held out there: no validation and no test samples"


def test_a_given_split_is_kept_and_its_torn_groups_are_counted():
    x, y = np.zeros((8, 1)), np.arange(8) % 2
    given_split = np.array([0, 0, 0, 2, 0, 2, 0, 2])
    made = Federation.from_assignment(x, y, [np.arange(8)], val=0, given=given_split, group=np.repeat([0, 1, 2, 3], 2))
    assert made.sizes("test").tolist() == [3]
    assert "3 groups lie on two sides of the split that the data bring, which is kept" in made.recipe["notes"]


def test_what_is_no_group_is_refused():
    x, y = np.zeros((4, 1)), np.arange(4) % 2
    for group, said in ((np.zeros(3), "one group for each of the 4 samples"), ([0, 1, np.nan, 1], "1 have none")):
        with pytest.raises(CoterieError, match=said):
            Federation.from_assignment(x, y, [np.arange(4)], group=group)
    with pytest.raises(CoterieError, match="one array for each client"):
        Federation.from_clients([(x, y)], group=[np.zeros(3)])
    with pytest.raises(CoterieError, match="the same clients"):
        Federation.from_clients({"a": (x, y)}, group={"b": np.zeros(4)})


# --- from files, to made-up clients, in words -------------------------------------------------------------------------


def write(path, n=240, clients=0):
    """Patients of 1 to 5 rows; `place` says which row of the file it is."""
    rng = np.random.default_rng(3)
    patient = np.sort(rng.integers(0, 80, n))
    lines = [f"{k},{rng.normal():.3f},p{p:03d},{p % 3 if clients else ''},{p % 2}" for k, p in enumerate(patient)]
    path.write_text("\n".join(["place,dose,patient,site,label", *lines]) + "\n")
    return np.array([f"p{p:03d}" for p in patient])


def test_group_in_a_table_is_a_role_and_no_feature(tmp_path):
    patient = write(tmp_path / "t.csv", clients=3)
    spelled = f"{tmp_path / 't.csv'}:client=site,group=patient"
    source = load(spelled)
    assert source.x.shape[1] == 2
    assert source.group.tolist() == patient.tolist()
    made = Experiment(data=spelled).federation()
    for i in range(made.clients):
        held = [set(patient[made.client(i, split)[0][:, 0].long()].tolist()) for split in SPLITS]
        assert sum(map(len, held)) == len(set().union(*held)), "a patient is on one side"
    assert "none on two sides of a split" in " ".join(made.summary().split())
    with pytest.raises(CoterieError, match="unknown column 'patent'; did you mean 'patient'"):
        load(f"{tmp_path / 't.csv'}:group=patent")
    with pytest.raises(CoterieError, match="column 'site' is the label, the client or the split already"):
        load(f"{tmp_path / 't.csv'}:client=site,group=site")


def test_without_group_the_same_table_tears_patients(tmp_path):
    """The other side of the test above: this is what happened to everybody, and now a note points to it."""
    patient = write(tmp_path / "t.csv", clients=3)
    made = Experiment(data=f"{tmp_path / 't.csv'}:client=site,ignore=patient").federation()
    torn = 0
    for i in range(made.clients):
        held = [set(patient[made.client(i, split)[0][:, 0].long()].tolist()) for split in SPLITS]
        torn += sum(map(len, held)) - len(set().union(*held))
    assert torn > 20
    assert any("group=patient keeps them on one side" in note for note in made.recipe["notes"])


@pytest.mark.parametrize("partition", ["iid", "dirichlet:alpha=0.5", "pathological:classes_per_client=1"])
def test_made_up_clients_get_whole_groups(tmp_path, partition):
    patient = write(tmp_path / "t.csv")
    asked = Experiment(data=f"{tmp_path / 't.csv'}:group=patient,ignore=site", partition=partition, clients=4)
    made = asked.federation()
    rows = [set(patient[np.concatenate([made.client(i, s)[0][:, 0].long() for s in SPLITS])]) for i in range(4)]
    assert sum(map(len, rows)) == len(set().union(*rows)), "no patient at two clients"
    assert "several clients" not in " ".join(made.recipe.get("notes", []))
    if partition == "iid":
        assert len(made.x) == len(patient), "every sample is dealt"
        with pytest.raises(CoterieError, match=f"{len(set(patient))} groups cannot be dealt to 200 clients"):
            asked.changed(clients=200).federation()


def test_groups_are_dealt_by_their_commonest_label():
    """Patient k has the label k % 2 in two rows and the other one in one: a client of one class holds such patients."""
    patient = np.repeat(np.arange(12), 3)
    labels = np.where(np.arange(36) % 3 == 2, 1 - patient % 2, patient % 2)
    dealt = groups.dealt_whole("pathological", labels, patient, 2, classes_per_client=1)
    assert [set((patient[mine] % 2).tolist()) for mine in dealt] == [{0}, {1}]
    assert sorted(np.concatenate(dealt).tolist()) == list(range(36))


def test_npz_takes_the_array_group_or_another_one(tmp_path):
    lesion = np.repeat(np.arange(20), 3)
    held = {"x": np.arange(60, dtype=np.float32)[:, None], "y": np.arange(60) % 2, "client": np.repeat([0, 1], 30)}
    np.savez(tmp_path / "a.npz", **held, group=lesion)
    np.savez(tmp_path / "b.npz", **held, lesion=lesion)
    for spelled in (tmp_path / "a.npz", f"{tmp_path / 'b.npz'}:group=lesion"):
        source = load(spelled)
        assert source.group.tolist() == lesion.tolist()
        made = Experiment(data=str(spelled)).federation()
        tested = [set(lesion[made.client(i, "test")[0][:, 0].long()]) for i in (0, 1)]
        trained = [set(lesion[made.client(i, "train")[0][:, 0].long()]) for i in (0, 1)]
        assert not any(a & b for a, b in zip(tested, trained, strict=True))
    assert load(tmp_path / "b.npz").group is None
    with pytest.raises(CoterieError, match=r"unknown array of '.*b.npz' 'lesoin'; did you mean 'lesion'"):
        load(f"{tmp_path / 'b.npz'}:group=lesoin")


def test_images_take_groups_from_an_index_and_a_folder_says_so(tmp_path):
    from PIL import Image

    for k in range(6):
        Image.new("RGB", (4, 4), (k, k, k)).save(tmp_path / f"{k}.png")
    rows = "".join(f"{k}.png,{'ab'[k % 2]},lesion {k // 2}\n" for k in range(6))
    for column, option in (("group", ""), ("lesion", ":group=lesion")):
        (tmp_path / "list.csv").write_text(f"path,label,{column}\n{rows}")
        assert load(f"{tmp_path / 'list.csv'}{option}").group.tolist() == [f"lesion {k // 2}" for k in range(6)]
    (tmp_path / "list.csv").write_text(f"path,label,group\n{rows}3.png,a,\n")
    with pytest.raises(CoterieError, match=r"1 line of the index is incomplete.*line 8 \(no group\)"):
        load(tmp_path / "list.csv")
    (tmp_path / "photos" / "a").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "photos" / "a" / "1.png")
    with pytest.raises(CoterieError, match="group=lesion needs an index"):
        load(f"{tmp_path / 'photos'}:group=lesion")


def test_hugging_face_data_take_groups():
    from data_files import dataset

    held = dataset()
    assert load(held, group="who").group.tolist() == ["u", "v"] * 3
    assert load(held, group="who", x="a").x.shape[1] == 1


def test_natural_clients_and_groups_agree_with_a_second_computation(tmp_path):
    """Groups by the codes in the federation, against those of the source by the samples' own numbers."""
    patient = write(tmp_path / "t.csv", clients=3)
    source = load(f"{tmp_path / 't.csv'}:client=site,group=patient")
    dealt, names = natural(source.client)
    made = Federation.from_assignment(source.x, source.y, dealt, names=names, group=source.group)
    codes = np.unique(patient, return_inverse=True)[1]
    assert made.group.tolist() == codes[made.x[:, 0].long().numpy()].tolist()
