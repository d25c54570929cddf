"""Guards: limits on a chain rather than on one kernel's call. They read facts by label: "fc1.num_groups", "recipe".

`recipe` and `dtype` are the chain's own. A guard reads only what the host knows; what lies on the device (rows per
group) is the kernel's duty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cute_kernels.catalog import GLU_ACTIVATIONS
from cute_kernels.limits import Facts, Limit, Refusal, Words
from cute_kernels.quantization.formats import Format, fp8_tensor, mxfp8


@dataclass(frozen=True)
class Guard(Limit):
    """A limit on a chain's facts."""

    stage: str = field(default="guard", kw_only=True)


@dataclass(frozen=True)
class Same(Guard):
    """Two facts are equal. `example` are two values that are not."""

    left: str
    right: str
    example: tuple[object, object] = (2, 3)

    def letters(self) -> tuple[str, ...]:
        return (self.left, self.right)

    def holds(self, facts: Facts) -> bool:
        return facts[self.left] == facts[self.right]

    def wanted(self, facts: Facts, words: Words) -> str:
        return f"{facts[self.right]} ({words.get(self.right, self.right)})"

    def counterexample(self) -> dict[str, object]:
        return dict(zip(self.letters(), self.example, strict=True))

    def __str__(self) -> str:
        return f"{self.left} equals {self.right}"


@dataclass(frozen=True)
class Absent(Guard):
    """A fact is not stated, None, False or 0. `calls` is what the reader would call that: "no quantisation recipe"."""

    fact: str
    calls: str
    example: object = True

    def letters(self) -> tuple[str, ...]:
        return (self.fact,)

    def holds(self, facts: Facts) -> bool:
        return not facts[self.fact]

    def check(self, facts: Facts, words: Words | None = None, rule: str = "") -> Refusal | None:
        return super().check({self.fact: None, **facts}, words, rule)

    def wanted(self, facts: Facts, words: Words) -> str:
        return self.calls

    def counterexample(self) -> dict[str, object]:
        return {self.fact: self.example}

    def __str__(self) -> str:
        return self.calls


@dataclass(frozen=True)
class RecipeIs(Guard):
    """The active quantisation recipe has this name; None: there is none."""

    name: str | None
    stage: str = field(default="recipe", kw_only=True)

    def letters(self) -> tuple[str, ...]:
        return ("recipe",)

    def holds(self, facts: Facts) -> bool:
        return facts["recipe"] == self.name

    def wanted(self, facts: Facts, words: Words) -> str:
        return self.name or "no quantisation recipe"

    def found(self, facts: Facts, words: Words) -> str:
        return f"{words.get('recipe', 'recipe')} is {facts['recipe']}" if facts["recipe"] else "there is no recipe"

    def counterexample(self) -> dict[str, object]:
        return {"recipe": "a recipe that nobody has"}

    def __str__(self) -> str:
        return f"the recipe is {self.name}" if self.name else "no quantisation recipe"


def _another(formats: tuple[Format, ...]) -> Format:
    """A format that is none of these."""
    return next(format for format in (mxfp8(), fp8_tensor()) if format not in formats)


@dataclass(frozen=True)
class RecipeFormat(Guard):
    """Where the recipe states the format of this operand, it is one of `formats`. role: "input", "weight", …"""

    role: str
    formats: tuple[Format, ...]

    def letters(self) -> tuple[str, ...]:
        return (f"recipe.{self.role}",)

    def check(self, facts: Facts, words: Words | None = None, rule: str = "") -> Refusal | None:
        return super().check({self.letters()[0]: self.formats[0], **facts}, words, rule)

    def holds(self, facts: Facts) -> bool:
        return facts[self.letters()[0]] in self.formats

    def wanted(self, facts: Facts, words: Words) -> str:
        return " or ".join(str(format) for format in self.formats)

    def counterexample(self) -> dict[str, object]:
        return {self.letters()[0]: _another(self.formats)}

    def __str__(self) -> str:
        return f"recipe.{self.role} is {' or '.join(str(format) for format in self.formats)}"


@dataclass(frozen=True)
class HeldIn(Guard):
    """Weights that a linear holds in few bits are in one of `formats`, which products read as they are."""

    label: str
    formats: tuple[Format, ...]

    def letters(self) -> tuple[str, ...]:
        return (f"{self.label}.held",)

    def check(self, facts: Facts, words: Words | None = None, rule: str = "") -> Refusal | None:
        return super().check({self.letters()[0]: None, **facts}, words, rule)

    def holds(self, facts: Facts) -> bool:
        return facts[self.letters()[0]] in (None, *self.formats)

    def wanted(self, facts: Facts, words: Words) -> str:
        return " or ".join([*map(str, self.formats), "high precision"])

    def found(self, facts: Facts, words: Words) -> str:
        return f"{words.get(self.label, self.label)} holds its weights in {facts[self.letters()[0]]}"

    def counterexample(self) -> dict[str, object]:
        return {self.letters()[0]: _another(self.formats)}

    def __str__(self) -> str:
        return f"{self.label} holds its weights in {self.wanted({}, {})}"


@dataclass(frozen=True)
class Feeds(Guard):
    """The activation between two linears fits both: columns in are twice (GLU) or exactly (others) the columns out."""

    columns: str
    kind: str
    inner: str

    def letters(self) -> tuple[str, ...]:
        return (self.columns, self.kind, self.inner)

    def holds(self, facts: Facts) -> bool:
        return facts[self.columns] == self._needed(facts)

    def wanted(self, facts: Facts, words: Words) -> str:
        inner = f"{words.get(self.inner, self.inner)} ({facts[self.inner]})"
        kind = facts[self.kind]
        if kind in GLU_ACTIVATIONS:
            return f"{self._needed(facts)}, twice {inner}: {kind} takes gate and up"
        return f"{self._needed(facts)}, the same as {inner}"

    def counterexample(self) -> dict[str, object]:
        return {self.columns: 256, self.kind: "swiglu", self.inner: 256}

    def _needed(self, facts: Facts) -> object:
        inner = facts[self.inner]
        return 2 * inner if isinstance(inner, int) and facts[self.kind] in GLU_ACTIVATIONS else inner

    def __str__(self) -> str:
        return f"{self.columns} is twice (GLU) or exactly (others) {self.inner}"


@dataclass(frozen=True)
class EvenForGlu(Guard):
    """A GLU takes an even number of columns: gate and up."""

    columns: str
    kind: str

    def letters(self) -> tuple[str, ...]:
        return (self.columns, self.kind)

    def holds(self, facts: Facts) -> bool:
        columns = facts[self.columns]
        return facts[self.kind] not in GLU_ACTIVATIONS or (isinstance(columns, int) and columns % 2 == 0)

    def wanted(self, facts: Facts, words: Words) -> str:
        return f"an even number: {facts[self.kind]} takes gate and up"

    def counterexample(self) -> dict[str, object]:
        return {self.columns: 255, self.kind: "swiglu"}

    def __str__(self) -> str:
        return f"{self.columns} is even for a GLU"


@dataclass(frozen=True)
class ClampIsLegal(Guard):
    """`act` is no clamped SwiGLU, or states all three constants: limit None or positive; alpha, offset finite."""

    act: str

    def letters(self) -> tuple[str, ...]:
        return (f"{self.act}.kind",)

    def holds(self, facts: Facts) -> bool:
        if facts[f"{self.act}.kind"] != "clamped_swiglu":
            return True
        limit = facts.get(f"{self.act}.limit", "not stated")
        constants = (facts.get(f"{self.act}.alpha"), facts.get(f"{self.act}.offset"))
        is_legal = limit is None or (isinstance(limit, (int, float)) and math.isfinite(limit) and limit > 0)
        return is_legal and all(isinstance(c, (int, float)) and math.isfinite(c) for c in constants)

    def wanted(self, facts: Facts, words: Words) -> str:
        return "a limit that is None or positive, and finite alpha and offset"

    def found(self, facts: Facts, words: Words) -> str:
        names = ("limit", "alpha", "offset")
        stated = ", ".join(f"{name}={facts.get(f'{self.act}.{name}', 'not stated')}" for name in names)
        return f"{words.get(self.act, self.act)} has {stated}"

    def counterexample(self) -> dict[str, object]:
        act = self.act
        return {f"{act}.kind": "clamped_swiglu", f"{act}.limit": -7.0, f"{act}.alpha": 1.702, f"{act}.offset": 1.0}

    def __str__(self) -> str:
        return f"{self.act}: a clamp has a positive limit (or None), finite alpha and offset"


# In tables, guards read as sentences.
same = Same
absent = Absent
recipe_is = RecipeIs
recipe_format = RecipeFormat
held_in = HeldIn
feeds = Feeds
even_for_glu = EvenForGlu
clamp_is_legal = ClampIsLegal
