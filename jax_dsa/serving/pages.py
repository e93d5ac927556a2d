"""Assigns the pages of a pool to requests, on the host."""

from __future__ import annotations

import numpy as np

from jax_dsa.core.checks import Args

__all__ = ["OutOfPagesError", "PageAllocator"]


class OutOfPagesError(RuntimeError):
    """The pool has too few free pages. The allocator's state has not changed."""


class PageAllocator:
    """Assigns the pages of a pool to the requests of a paged cache.

    A cache has B slots, each of which holds one request at a time. Before a request gets more
    tokens, `reserve` makes sure that its slot has pages for them; after its end, `free` gives its
    pages back. `table` is the page table to pass to the cache's `with_page_table`. A page belongs
    to at most one slot. Set the length of a slot to 0 for its next request (`with_lengths`), so
    that the rows of the former request are not visible.

    The allocator runs on the host and holds no device arrays.

    Args:
        num_pages: P, number of pages in the pool.
        page_size: L, number of tokens per page.
        slots: B, number of requests that the cache holds at a time.
        pages_per_request: R, number of entries of a slot in the page table. By default a slot may
            have all pages of the pool.

    Raises:
        TypeError, ValueError: If an argument is not an int or is out of range.

    Examples:
        >>> from jax_dsa.serving import PageAllocator
        >>> pages = PageAllocator(num_pages=4, page_size=16, slots=2, pages_per_request=3)
        >>> pages.reserve(0, 40)  # 40 tokens need 3 pages
        >>> pages.fits(1, 20)  # 20 tokens need 2 pages, and 1 is free
        False
        >>> pages.free(0)
        >>> pages.reserve(1, 20)
        >>> pages.table
        array([[-1, -1, -1],
               [ 0,  1, -1]], dtype=int32)
    """

    def __init__(
        self, num_pages: int, page_size: int, slots: int, pages_per_request: int | None = None
    ) -> None:
        args = self._args("")
        self.num_pages = args.integer("num_pages", num_pages, 0)
        self.page_size = args.integer("page_size", page_size, 1)
        self.slots = args.integer("slots", slots, 0)
        if pages_per_request is None:
            pages_per_request = self.num_pages
        self.pages_per_request = args.integer("pages_per_request", pages_per_request, 0)
        self._table = np.full((self.slots, self.pages_per_request), -1, np.int32)
        self._pages = np.zeros(self.slots, np.int64)  # of each slot
        self._free = list(range(self.num_pages))[::-1]  # The next page is the last entry.

    @property
    def table(self) -> np.ndarray:
        """The page table, int32 [B, R], -1 in entries without a page. The array is a copy."""
        return self._table.copy()

    @property
    def free_pages(self) -> int:
        """Number of pages that belong to no slot."""
        return len(self._free)

    def fits(self, slot: int, tokens: int) -> bool:
        """Returns whether `reserve(slot, tokens)` would succeed now.

        Args:
            slot: Number of the slot.
            tokens: Number of tokens that the slot's request is to have in total.

        Raises:
            TypeError, ValueError: As for `reserve`.
        """
        slot, wanted = self._checked("fits", slot, tokens)
        return bool(wanted - self._pages[slot] <= len(self._free))

    def reserve(self, slot: int, tokens: int) -> None:
        """Makes sure that a slot has pages for its first `tokens` tokens.

        Pages that the slot already has stay where they are.

        Args:
            slot: Number of the slot, 0 to B - 1.
            tokens: Number of tokens that the slot's request is to have in total, 0 to R * L.

        Raises:
            OutOfPagesError: If the pool has too few free pages. Nothing has changed then; free
                another slot, or wait for the end of its request, and reserve again.
            TypeError, ValueError: If an argument is not an int or is out of range.
        """
        slot, wanted = self._checked("reserve", slot, tokens)
        held = int(self._pages[slot])
        if wanted - held > len(self._free):
            raise OutOfPagesError(
                f"PageAllocator.reserve: {tokens} tokens in slot {slot} need {wanted - held} more "
                f"pages of {self.page_size} tokens, and {len(self._free)} of {self.num_pages} are "
                f"free; free a slot first"
            )
        for entry in range(held, wanted):
            self._table[slot, entry] = self._free.pop()
        self._pages[slot] = max(held, wanted)

    def free(self, slot: int) -> None:
        """Gives all pages of a slot back to the pool. A slot without pages stays as it is.

        Append nothing to the slot until the cache has the new `table`: another slot may get these
        pages.

        Args:
            slot: Number of the slot, 0 to B - 1.

        Raises:
            TypeError, ValueError: If `slot` is not an int or is out of range.
        """
        slot = self._slot(self._args(".free"), slot)
        held = self._table[slot, : self._pages[slot]]
        self._free.extend(held[::-1].tolist())
        held[:] = -1
        self._pages[slot] = 0

    @staticmethod
    def _args(method: str) -> Args:
        return Args(f"PageAllocator{method}", "", np.empty(0), "K")

    def _slot(self, args: Args, slot: int) -> int:
        return args.integer("slot", slot, 0, self.slots - 1)

    def _checked(self, method: str, slot: int, tokens: int) -> tuple[int, int]:
        """Returns the checked slot, and the number of pages that it needs for `tokens` tokens."""
        args = self._args(f".{method}")
        most = self.pages_per_request * self.page_size
        tokens = args.integer("tokens", tokens, 0, most)
        return self._slot(args, slot), -(-tokens // self.page_size)
