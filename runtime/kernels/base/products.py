"""Products of tensor cores that go on while the program does."""

# Triton takes constants where its types say that it takes what they hold.
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finished(acc, ASM: tl.constexpr):
    """``acc``, once the products that it sums up have read their operands. For the end of a loop whose next turn makes others.

    Hopper's products read a left operand in registers while the program goes on. Triton lets some of them be under way when
    the next turn writes to these registers (its issue 9433; in 3.7.1, too), unless something in the loop uses the sums: this
    does, and becomes no instruction. ``tools/compiler_faults.py`` finds where it is missing.
    """
    if ASM:
        return tl.inline_asm_elementwise("// $0", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc
