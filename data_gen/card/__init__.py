"""Data cards: what a set of sampled answers holds."""

from data_gen.card.write import write_card

__all__ = ["write_card"]
