"""What of a model must be personal: accuracy against the bytes that a client keeps, from nothing to everything."""

from coterie.dissect.answer import Found, Gain, answer
from coterie.dissect.measure import Asked, Dissection, measure
from coterie.dissect.points import Point, points_of

__all__ = ["Asked", "Dissection", "Found", "Gain", "Point", "answer", "measure", "points_of"]
