"""A tool-using world of several turns: find a hidden total by asking a small shop's tools."""

import random

from pydantic import Field

from deltawire.job.toolset import ToolsetWorld
from deltawire.job.world import WorldConfig

_GOODS = ("apple", "bread", "candle", "drum", "egg", "fan", "glove", "hat", "ink", "jar")


class ToolsConfig(WorldConfig):
    """How long the shopping list is."""

    max_turns: int = Field(6, ge=2)
    items: int = Field(3, ge=1, le=len(_GOODS))
    largest_price: int = Field(20, ge=1)


class ToolsWorld(ToolsetWorld):
    """Prices differ in every shop, so only the tools know them."""

    Config = ToolsConfig

    def __init__(self, config: ToolsConfig) -> None:
        arguments = {"items": config.items, "largest_price": config.largest_price}
        super().__init__(Shop, config=arguments, max_turns=config.max_turns)
        self.name = "tools"
        self.description = "Add up a shopping list with the help of tools."


class Shop:
    """One shop with its own prices."""

    def __init__(self, items: int, largest_price: int) -> None:
        self._items, self._largest_price = items, largest_price
        self._total: int | None = None

    def reset(self, *, rng: random.Random) -> str:
        self._prices = {name: rng.randint(1, self._largest_price) for name in _GOODS}
        wanted = rng.sample(_GOODS, self._items)
        self._right = sum(self._prices[name] for name in wanted)
        return f"What do these cost together: {', '.join(wanted)}? Pay the total."

    def price(self, item: str) -> str:
        """Look up what one item costs.

        Args:
            item: Its name, such as apple.
        """
        if item not in self._prices:
            raise ValueError(f"we do not sell {item!r}")
        return str(self._prices[item])

    def pay(self, total: int) -> str:
        """Pay the whole list.

        Args:
            total: The sum of all prices.
        """
        self._total = total
        return "Thank you." if total == self._right else "That is not the right sum."

    def get_reward(self) -> float:
        return float(self._total == self._right)
