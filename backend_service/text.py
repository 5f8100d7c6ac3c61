"""Token ids in, text out: characters that tokens cut in half, and stop strings."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Sequence


class TextStream:
    """The text of one answer, shown as early as it is certain and never taken back.

    What is shown, concatenated, is the UTF-8 decoding of all pieces (invalid bytes as U+FFFD) up to the first stop
    string: the one that starts earliest, whatever the tokens' borders. Held back is only an incomplete character and,
    after it, the longest tail that some stop string starts with.
    """

    def __init__(self, pieces: Sequence[bytes], stop: Sequence[str] = ()) -> None:
        """`pieces`: the bytes of each token id, empty for control tokens; `stop`: strings of at least one character."""
        if "" in stop:
            raise ValueError("an empty stop string ends every answer at once; leave it out")
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(sorted(stop))
        self._longest_stop = max(map(len, stop), default=0)
        first_characters = "".join({re.escape(string[0]) for string in stop})
        self._may_start = re.compile(f"[{first_characters}]") if stop else None
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """A stop string came up, in `feed` or at the very end in `flush`; nothing more will be shown."""
        return self._stopped

    def feed(self, token_id: int) -> str:
        """The text that may be shown now that this token is known; often empty or more than the token's own."""
        return self._show(self._decoder.decode(self._pieces[token_id]), last=False)

    def flush(self) -> str:
        """The text still held back, at the end of the answer. An incomplete character becomes U+FFFD."""
        return self._show(self._decoder.decode(b"", final=True), last=True)

    def _show(self, text: str, *, last: bool) -> str:
        if self._stopped:
            return ""
        if self._may_start is None:
            return text
        text = self._held + text
        self._held = ""
        # Left to right over the places where a stop string may start; each place is given up once, so the whole
        # answer costs O(characters), however the stop strings overlap with themselves or each other.
        place = self._may_start.search(text)
        while place is not None:
            start = place.start()
            if text.startswith(self._stop, start):
                self._stopped = True
                return text[:start]
            if not last and self._may_become_stop(text, start):
                self._held = text[start:]
                return text[:start]
            place = self._may_start.search(text, start + 1)
        return text

    def _may_become_stop(self, text: str, start: int) -> bool:
        if len(text) - start >= self._longest_stop:
            return False
        tail = text[start:]
        # Of sorted strings, those that start with `tail` follow its own place.
        index = bisect_left(self._stop, tail)
        return index < len(self._stop) and self._stop[index].startswith(tail)
