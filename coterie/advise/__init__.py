"""Which way of personalization suits this federation: a short pilot, and advice with the numbers behind it."""

from coterie.advise.decision import Advice, Candidate, Findings, decide
from coterie.advise.pilot import Pilot, advise

__all__ = ["Advice", "Candidate", "Findings", "Pilot", "advise", "decide"]
