"""Limits: what a kernel or a rule demands, stated once.

The same object selects (`check`), explains (`str`, and `str` of its `Refusal`), raises (`raise_refusal`) and gives the
tests something that it must refuse (`counterexample`). A limit reads facts: a mapping from names such as "K" or
"fc1.num_groups" to what the host knows without asking the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from cute_kernels.target import Package

Facts = Mapping[str, object]
Words = Mapping[str, str]

STAGES = ("chain", "target", "recipe", "guard", "limit", "package", "shadowed", "call", "compile")
INTERLEAVES = (1, 2, 4, 8, 16, 32, 64, 128)
STORED_INTERLEAVES = (1, 8, 16, 32)
"""Blocks of gate and up columns of a weight stored [K, N], and of a pre-activation, that kernels read."""
DTYPES = ("bfloat16", "float16")

_PHRASES = {
    "chain": "wants {wanted}; found {found}",
    "target": "needs {wanted}; this is {found}",
    "package": "needs {wanted}; {found}",
    "compile": "needs {wanted}; {found}",
}


@dataclass(frozen=True)
class Refusal:
    """Why not: which rule or kernel, at which stage, what it wanted and found, and what would help (may be empty).

    multiple: where a multiple of a number is wanted, that number, else 0.
    """

    rule: str
    stage: str
    wanted: str
    found: str
    fix: str = ""
    multiple: int = 0

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"stage is {self.stage!r}, needs one of: {', '.join(STAGES)}")

    def named(self, rule: str) -> Refusal:
        """The same refusal on behalf of `rule`."""
        return replace(self, rule=rule)

    def __str__(self) -> str:
        """The condition without the rule: "K is 12, needs a multiple of 8"."""
        text = _PHRASES.get(self.stage, "{found}, needs {wanted}").format(wanted=self.wanted, found=self.found)
        return f"{text}; {self.fix}" if self.fix else text


def raise_refusal(refusal: Refusal) -> NoReturn:
    """Raises `ValueError` with the rule and the text that `explain` would show."""
    raise ValueError(f"{refusal.rule}: {refusal}" if refusal.rule else str(refusal))


@dataclass(frozen=True)
class Limit:
    """A named constraint on facts. A subclass says which facts it reads, whether it holds, and the words for both.

    stage: where a refusal is reported. fix: what the reader can do about it.
    """

    stage: str = field(default="limit", kw_only=True)
    fix: str = field(default="", kw_only=True)

    def letters(self) -> tuple[str, ...]:
        """The names of the facts that it reads."""
        raise NotImplementedError

    def holds(self, facts: Facts) -> bool:
        raise NotImplementedError

    def wanted(self, facts: Facts, words: Words) -> str:
        raise NotImplementedError

    def found(self, facts: Facts, words: Words) -> str:
        letter = self.letters()[0]
        return f"{words.get(letter, letter)} is {facts[letter]}"

    def counterexample(self) -> dict[str, object]:
        """Facts that this limit refuses."""
        raise NotImplementedError

    def check(self, facts: Facts, words: Words | None = None, rule: str = "") -> Refusal | None:
        """None if it holds. `words` puts the caller's names in place of the letters; a missing fact is refused too."""
        words = words or {}
        for letter in self.letters():
            if letter not in facts:
                missing = f"{words.get(letter, letter)} is not stated"
                return Refusal(rule, self.stage, str(self), missing, self.fix)
        if self.holds(facts):
            return None
        return Refusal(rule, self.stage, self.wanted(facts, words), self.found(facts, words), self.fix)


@dataclass(frozen=True)
class MultipleOf(Limit):
    """`letter` is a positive multiple of `factor`."""

    letter: str
    factor: int

    def letters(self) -> tuple[str, ...]:
        return (self.letter,)

    def holds(self, facts: Facts) -> bool:
        value = facts[self.letter]
        return isinstance(value, int) and value > 0 and value % self.factor == 0

    def check(self, facts: Facts, words: Words | None = None, rule: str = "") -> Refusal | None:
        refusal = super().check(facts, words, rule)
        return refusal and replace(refusal, multiple=self.factor)

    def wanted(self, facts: Facts, words: Words) -> str:
        return f"a multiple of {self.factor}"

    def counterexample(self) -> dict[str, object]:
        return {self.letter: 16 * self.factor + self.factor // 2}

    def __str__(self) -> str:
        return f"{self.letter} is a multiple of {self.factor}"


@dataclass(frozen=True)
class OneOf(Limit):
    """`letter` is one of `values`."""

    letter: str
    values: tuple[object, ...]

    def letters(self) -> tuple[str, ...]:
        return (self.letter,)

    def holds(self, facts: Facts) -> bool:
        return facts[self.letter] in self.values

    def wanted(self, facts: Facts, words: Words) -> str:
        return " or ".join(str(value) for value in self.values)

    def found(self, facts: Facts, words: Words) -> str:
        return str(facts[self.letter]) if self.stage == "target" else super().found(facts, words)

    def counterexample(self) -> dict[str, object]:
        return {self.letter: "something else"}

    def __str__(self) -> str:
        return f"{self.letter} is {' or '.join(str(value) for value in self.values)}"


@dataclass(frozen=True)
class AtLeast(Limit):
    """`letter >= least`."""

    letter: str
    least: int

    def letters(self) -> tuple[str, ...]:
        return (self.letter,)

    def holds(self, facts: Facts) -> bool:
        value = facts[self.letter]
        return isinstance(value, int) and value >= self.least

    def wanted(self, facts: Facts, words: Words) -> str:
        return f"at least {self.least}"

    def counterexample(self) -> dict[str, object]:
        return {self.letter: self.least - 1}

    def __str__(self) -> str:
        return f"{self.letter} is at least {self.least}"


@dataclass(frozen=True)
class AtMost(Limit):
    """`letter <= most`."""

    letter: str
    most: int

    def letters(self) -> tuple[str, ...]:
        return (self.letter,)

    def holds(self, facts: Facts) -> bool:
        value = facts[self.letter]
        return isinstance(value, int) and value <= self.most

    def wanted(self, facts: Facts, words: Words) -> str:
        return f"at most {self.most}"

    def counterexample(self) -> dict[str, object]:
        return {self.letter: self.most + 1}

    def __str__(self) -> str:
        return f"{self.letter} is at most {self.most}"


@dataclass(frozen=True)
class InterleaveFits(Limit):
    """`letter` is 0 or None (plain halves) or one of `sizes`, and then divides the width `of`, in columns of one half.

    Reported under the name that the ops give it, glu_interleave_size.
    """

    letter: str
    of: str
    sizes: tuple[int, ...] = INTERLEAVES
    plain: bool = True

    def letters(self) -> tuple[str, ...]:
        return (self.letter, self.of)

    def holds(self, facts: Facts) -> bool:
        size, width = facts[self.letter], facts[self.of]
        if not size:
            return self.plain
        return size in self.sizes and isinstance(size, int) and isinstance(width, int) and width % size == 0

    def wanted(self, facts: Facts, words: Words) -> str:
        sizes = ", ".join(str(size) for size in self.sizes)
        if facts[self.letter] in self.sizes:
            of = words.get(self.of, self.of)
            return f"a divisor of {of} ({facts[self.of]})"
        if not self.plain:
            return sizes
        return f"None or {'one of ' if len(self.sizes) > 1 else ''}{sizes}"

    def found(self, facts: Facts, words: Words) -> str:
        size = facts[self.letter]
        return f"{words.get(self.letter, self.letter)}_size is {size or None}"

    def counterexample(self) -> dict[str, object]:
        return {self.letter: 3, self.of: 384} if self.plain else {self.letter: 0, self.of: 384}

    def __str__(self) -> str:
        plain = "None or " if self.plain else ""
        return f"{self.letter}_size is {plain}{', '.join(str(s) for s in self.sizes)}, dividing {self.of}"


@dataclass(frozen=True)
class NotTransposedFor(Limit):
    """`letter`, whether a weight is stored [K, N], is false if `activation` is one of `kinds`."""

    letter: str
    activation: str
    kinds: tuple[str, ...]

    def letters(self) -> tuple[str, ...]:
        return (self.letter, self.activation)

    def holds(self, facts: Facts) -> bool:
        return not facts[self.letter] or facts[self.activation] not in self.kinds

    def wanted(self, facts: Facts, words: Words) -> str:
        return f"False with {facts[self.activation]}: gate and up columns are loaded by rows of an [N, K] weight"

    def counterexample(self) -> dict[str, object]:
        return {self.letter: True, self.activation: self.kinds[0]}

    def __str__(self) -> str:
        return f"{self.letter} is False for {', '.join(self.kinds)}"


@dataclass(frozen=True)
class StoredInterleaveFits(Limit):
    """If `letter`, a weight is stored [K, N], `block` is 0 or None (plain halves) or one of `sizes`."""

    letter: str
    block: str
    sizes: tuple[int, ...] = STORED_INTERLEAVES

    def letters(self) -> tuple[str, ...]:
        return (self.letter, self.block)

    def holds(self, facts: Facts) -> bool:
        return not facts[self.letter] or not facts[self.block] or facts[self.block] in self.sizes

    def wanted(self, facts: Facts, words: Words) -> str:
        sizes = ", ".join(str(size) for size in self.sizes)
        return (
            f"False with {self.block}_size {facts[self.block]}: gate and up columns lie in halves or blocks of {sizes}"
        )

    def counterexample(self) -> dict[str, object]:
        return {self.letter: True, self.block: 2}

    def __str__(self) -> str:
        sizes = ", ".join(str(size) for size in self.sizes)
        return f"{self.letter} is False, or {self.block}_size None or one of {sizes}"


@dataclass(frozen=True)
class FixedFor(Limit):
    """`letter` is `value` if `activation` is `kind`; of other activations it does not matter."""

    letter: str
    value: float
    activation: str
    kind: str

    def letters(self) -> tuple[str, ...]:
        return (self.letter, self.activation)

    def holds(self, facts: Facts) -> bool:
        return facts[self.activation] != self.kind or facts[self.letter] == self.value

    def wanted(self, facts: Facts, words: Words) -> str:
        return f"{self.value} with {self.kind}"

    def counterexample(self) -> dict[str, object]:
        return {self.letter: self.value + 1, self.activation: self.kind}

    def __str__(self) -> str:
        return f"{self.letter} is {self.value} for {self.kind}"


@dataclass(frozen=True)
class GivenFor(Limit):
    """`letter` is not None if `activation` is `kind`; of other activations it does not matter."""

    letter: str
    activation: str
    kind: str

    def letters(self) -> tuple[str, ...]:
        return (self.letter, self.activation)

    def holds(self, facts: Facts) -> bool:
        return facts[self.activation] != self.kind or facts[self.letter] is not None

    def wanted(self, facts: Facts, words: Words) -> str:
        return f"a number with {self.kind}"

    def counterexample(self) -> dict[str, object]:
        return {self.letter: None, self.activation: self.kind}

    def __str__(self) -> str:
        return f"{self.letter} is given for {self.kind}"


@dataclass(frozen=True)
class Installed(Limit):
    """A package is there, in a version that is known to work. Reads the fact of the package's name."""

    package: Package
    stage: str = field(default="package", kw_only=True)

    def letters(self) -> tuple[str, ...]:
        return (self.package.name,)

    def holds(self, facts: Facts) -> bool:
        version = facts[self.package.name]
        return self.package.fits(None if version is None else str(version))

    def wanted(self, facts: Facts, words: Words) -> str:
        return str(self.package)

    def found(self, facts: Facts, words: Words) -> str:
        version = facts[self.package.name]
        return "it is not installed" if version is None else f"{version} is installed"

    def counterexample(self) -> dict[str, object]:
        return {self.package.name: None}

    def __str__(self) -> str:
        return f"{self.package} is installed"


# In tables, limits read as sentences: multiple_of("K", 8), one_of("dtype", DTYPES).
multiple_of = MultipleOf
one_of = OneOf
at_least = AtLeast
at_most = AtMost
interleave_fits = InterleaveFits
not_transposed_for = NotTransposedFor
fixed_for = FixedFor
stored_interleave_fits = StoredInterleaveFits
given_for = GivenFor
installed = Installed


def dtype_name(dtype: object) -> str:
    """The name that limits use for a dtype: `torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")
