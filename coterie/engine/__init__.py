"""Engines compute what a cohort asks for."""
