"""PTX within a kernel."""

from cutlass._mlir.dialects import llvm


def asm(result, operands, text: str, constraints: str, loc, ip, effects: bool = False):
    """What `text` gives: a value of the class `result`, a list of values if it is a list of classes, or None.

    $0 and so on are first the results, then the operands; constraints: the register of each ("=r", "f", …), as LLVM has
    them. effects: it does more than compute its results of its operands, so it is neither left out nor moved.
    """
    kinds = [] if result is None else result if isinstance(result, list) else [result]
    types = [kind.mlir_type for kind in kinds]
    whole = None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    found = llvm.inline_asm(
        whole, [x.ir_value(loc=loc, ip=ip) for x in operands], text, constraints, has_side_effects=effects,
        is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    if result is None:
        return None
    if len(kinds) == 1:
        values = [kinds[0](found)]
    else:
        parts = [llvm.extractvalue(kind, found, [i], loc=loc, ip=ip) for i, kind in enumerate(types)]
        values = [kind(part) for kind, part in zip(kinds, parts, strict=True)]
    return values if isinstance(result, list) else values[0]
