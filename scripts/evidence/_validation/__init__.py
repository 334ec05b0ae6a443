"""Which times a simulated step should have, held against recorded ones."""
