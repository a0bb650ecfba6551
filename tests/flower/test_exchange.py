"""Experiments in step: one message a site, each experiment its own answers, and why an answer is missing."""

from __future__ import annotations

import pytest

from coterie.flower.exchange import Ask, answered, drive
from coterie.flower.wire import Failure, Parcel


class Line:
    """Answers by a table: site -> what comes back; whoever is not in it stays silent."""

    def __init__(self, answers):
        self.answers, self.sent = answers, []

    def sites(self):
        return set(self.answers)

    def ask(self, messages, deadline, enough):
        self.sent.append({name: [parcel.meta["task"] for parcel in parcels] for name, parcels in messages.items()})
        found = {}
        for name in messages:
            if enough({site for site, answer in found.items() if not isinstance(answer, Failure)}):
                break
            if name in self.answers:
                answer = self.answers[name]
                found[name] = answer(messages[name]) if callable(answer) else answer
        return found


def echo(parcels):
    return [Parcel({"to": parcel.meta["task"]}) for parcel in parcels]


def experiment(asks, heard):
    """Asks one question after another: each a (task, sites, wanted); writes down what it is sent."""
    for task, sites, wanted in asks:
        answers = yield Ask({name: Parcel({"task": task}) for name in sites}, frozenset(sites), wanted)
        heard.append({name: found if isinstance(found, Failure) else found.meta["to"]
                      for name, found in answers.items()})


def test_tasks_of_the_same_time_are_one_message_a_site():
    """a asks twice and b once: first both speak to y in one message, then a goes on alone."""
    line, a, b = Line({"x": echo, "y": echo, "z": echo}), [], []
    drive([experiment([("a1", "xy", 2), ("a2", "x", 1)], a), experiment([("b1", "yz", 2)], b)], line, 5.0)
    assert line.sent == [{"x": ["a1"], "y": ["a1", "b1"], "z": ["b1"]}, {"x": ["a2"]}]
    assert a == [{"x": "a1", "y": "a1"}, {"x": "a2"}]
    assert b == [{"y": "b1", "z": "b1"}]


@pytest.mark.parametrize(("answers", "names"), [
    ({"x": [Parcel({})], "y": [Parcel({"error": "no", "cause": "failed"})]}, {"x"}),
    ({"x": [Parcel({}), Parcel({})], "y": [Parcel({}), Failure("rejected", "")], "z": Failure("lost", "")}, {"x"}),
])
def test_who_says_that_it_failed_has_not_answered(answers, names):
    """Else one site with quick errors is enough for a `target`, and the others' answers are not waited for."""
    assert answered(answers) == names


@pytest.mark.parametrize(("answers", "wanted", "failure"), [
    ({"x": echo}, 2, Failure("late", "no answer within 5 s.")),  # y never answered, and x alone is not enough
    ({"x": echo, "y": echo}, 1, Failure("late", "enough others had answered.")),  # y was not waited for
    ({"x": Failure("lost", "gone")}, 1, Failure("late", "no answer within 5 s.")),  # a failure is no answer
    ({"x": echo, "y": Failure("absent", "the site is not connected.")}, 2,
     Failure("absent", "the site is not connected.")),  # what the transport says is passed on
    ({"x": echo, "y": lambda parcels: echo(parcels) * 2}, 2,
     Failure("mismatch", "2 answers came for 1 tasks.", "header")),
])
def test_every_site_that_was_asked_has_an_answer_or_a_reason(answers, wanted, failure):
    heard = []
    drive([experiment([("a", "xy", wanted)], heard)], Line(answers), 5.0)
    assert heard[0].keys() == {"x", "y"}
    assert heard[0]["y"] == failure
