"""PTX that turns packed codes into half-precision numbers, two neighbouring 16-bit words at a time.

Every routine works lane by lane: a 32-bit register holds two words, nothing crosses from one into the
other, and so it means the same for any layout of a tensor. A code is put into the mantissa of a number
whose exponent makes the last bits worth one (1024 in float16, 128 in bfloat16), which one ``lop3``
does for two words, and one fused multiply-add takes the offset away: exactly, since all are small
integers. Floating-point codes have their bits moved into place and are multiplied by the difference of
the exponents' biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

_AND_OR = "0xea"  # (a & b) | c
_NOT_AND_OR = "0xae"  # (~a & b) | c


@dataclass(frozen=True)
class Half:
    """A 16-bit floating-point format: its bits of mantissa and the bias of its exponent."""

    name: str
    mantissa: int
    bias: int

    def bits(self, value: float) -> int:
        """A normal number's bits; it must be representable."""
        if value == 0:
            return 0
        sign, magnitude, exponent = int(value < 0), abs(value), 0
        while magnitude >= 2:
            magnitude, exponent = magnitude / 2, exponent + 1
        while magnitude < 1:
            magnitude, exponent = magnitude * 2, exponent - 1
        fraction = (magnitude - 1) * (1 << self.mantissa)
        assert fraction == int(fraction), f"{value} is not a {self.name}"
        assert 0 < exponent + self.bias < (1 << (15 - self.mantissa)) - 1, f"{value} is not a normal {self.name}"
        return sign << 15 | (exponent + self.bias) << self.mantissa | int(fraction)

    @property
    def units(self) -> int:
        """The power of two whose numbers are one apart."""
        return 1 << self.mantissa


FLOAT16 = Half("f16", 10, 15)
BFLOAT16 = Half("bf16", 7, 127)


@dataclass
class _Writer:
    """Lines of PTX; shifted copies of a word are made once."""

    half: Half
    lines: list[str] = field(default_factory=list)
    names: Iterator[int] = field(default_factory=lambda: iter(range(1 << 20)))
    shifted: dict[tuple[str, int], str] = field(default_factory=dict)
    constants: dict[float | None, str] = field(default_factory=dict)

    def new(self, line: str) -> str:
        """One instruction into a register of its own; ``@`` stands for it."""
        name = f"r{next(self.names)}"
        self.lines.append(line.replace("@", name))
        return name

    def shift(self, word: str, by: int) -> str:
        """``word`` moved to the right, or to the left for negative ``by``. What comes from the other word must be masked."""
        if by == 0:
            return word
        if (word, by) not in self.shifted:
            self.shifted[word, by] = self.new(f"shr.b32 @, {word}, {by};" if by > 0 else f"shl.b32 @, {word}, {-by};")
        return self.shifted[word, by]

    def constant(self, value: float | None) -> str:
        """A register of it, as ``fma`` takes no immediate numbers; None is -0, to which anything can be added."""
        if value not in self.constants:
            bits = 0x8000 if value is None else self.half.bits(value)
            self.constants[value] = self.new(f"mov.b32 @, {_pair(bits)};")
        return self.constants[value]

    def pick(self, word: str, mask: int, rest: int | str, inverted: bool = False) -> str:
        """``(word & mask) | rest``."""
        other = rest if isinstance(rest, str) else _pair(rest)
        return self.new(f"lop3.b32 @, {word}, {_pair(mask)}, {other}, {_NOT_AND_OR if inverted else _AND_OR};")

    def fma(self, a: str, b: float | str, c: float | str | None, to: str = "@") -> str:
        """``a * b + c``, rounded once."""
        parts = [p if isinstance(p, str) else self.constant(p) for p in (b, c)]
        text = f"fma.rn.{self.half.name}x2 {to}, {a}, {parts[0]}, {parts[1]};"
        if to == "@":
            return self.new(text)
        self.lines.append(text)
        return to

    def text(self) -> str:
        registers = f".reg .b32 r<{next(self.names) + 1}>;"
        return "{\n" + "\n".join([registers, *self.lines]) + "\n}"


def integers(bits: int, half: Half) -> str:
    """Codes of ``bits``, stored with 2^(bits-1) added, low ones first. The word is the operand after the outputs."""
    write, fields = _Writer(half), 16 // bits
    for i in range(fields):
        if bits > half.mantissa:
            _wide_byte(write, f"${fields}", 8 * i, f"${i}")
        else:
            _integer(write, f"${fields}", None, bits, i * bits, f"${i}")
    return write.text()


def nested(half: Half) -> str:
    """Four codes of 8 bits, stored with 128 added: their upper four bits in one word, their lower ones in another."""
    write = _Writer(half)
    for i in range(4):
        upper = _integer(write, "$4", None, 4, 4 * i, "@")
        write.fma(upper, 16.0, _integer(write, "$5", None, 4, 4 * i, "@", offset=0), f"${i}")
    return write.text()


def upper(half: Half) -> str:
    """Of the same four codes, what is in the middle of all that share the upper four bits: 16 times those, and 8."""
    write = _Writer(half)
    for i in range(4):
        # Twice the bits and one, so that the half in the middle is a whole number.
        found = write.pick(write.shift("$4", 4 * i - 1), 15 << 1, half.bits(half.units + 1))
        write.fma(found, 8.0, -8.0 * (half.units + 16), f"${i}")
    return write.text()


def three_bits(half: Half, second: bool) -> str:
    """Codes of 3 bits: eight pairs of low bits in one word, the high bits in another.

    The other word serves two of the first: its bit ``2i + 2`` (of 16, counted around) belongs to code
    ``i`` of the first and the bit after that to code ``i`` of the second.
    """
    write = _Writer(half)
    high = write.shift("$9", 1) if second else "$9"
    for i in range(8):
        _integer(write, "$8", high, 2, 2 * i, f"${i}")
    return write.text()


def floats4(half: Half) -> str:
    """Four e2m1 codes, whose bits lie as :data:`FLOAT4_PLACES` says."""
    write = _Writer(half)
    exponent = half.mantissa - 1
    for i, (sign, rest) in enumerate(FLOAT4_PLACES):
        found = write.pick(write.shift("$4", sign - 15), 0x8000, 0)
        found = write.pick(write.shift("$4", rest - exponent), 7 << exponent, found)
        write.fma(found, 2.0 ** (half.bias - 1), None, f"${i}")
    return write.text()


# Where a 16-bit word has the sign and the lowest of the three other bits of each of its four e2m1 codes. The first needs
# no shift for float16, and together they need the fewest for both.
FLOAT4_PLACES = ((15, 9), (12, 6), (14, 3), (13, 0))


def floats8(half: Half) -> str:
    """Two e4m3 codes, the low byte first."""
    write = _Writer(half)
    lowest = half.mantissa - 3
    for i in range(2):
        found = write.pick(write.shift("$2", 8 * i - 8), 0x8000, 0)
        found = write.pick(write.shift("$2", 8 * i - lowest), 0x7F << lowest, found)
        write.fma(found, 2.0 ** (half.bias - 7), None, f"${i}")
    return write.text()


def sparse4(half: Half, second: bool) -> str:
    """Two groups of four weights of which two are stored: their 4-bit codes, and a bit for each place that has one.

    ``$8`` holds both values of the first group, then of the second. ``$9`` holds the places of four
    groups, of which ``second`` takes the last two.
    """
    write = _Writer(half)
    for group in range(2):
        first, last = (_integer(write, "$8", None, 4, 8 * group + 4 * i, "@") for i in range(2))
        nibble = 8 * second + 4 * group
        here = [_integer(write, "$9", None, 1, nibble + i, "@", offset=0) for i in range(4)]
        apart = write.fma(first, -1.0, last)
        back = write.fma(last, -1.0, first)
        # A place in the middle holds the first of the two unless the place outside it already does.
        lower = write.fma(apart, here[0], first)
        upper = write.fma(back, here[3], last)
        for i, value in enumerate((first, lower, upper, last)):
            write.fma(value, here[i], None, f"${4 * group + i}")
    return write.text()


def minus(half: Half) -> str:
    """``$1 - $2``."""
    write = _Writer(half)
    write.fma("$2", -1.0, "$1", "$0")
    return write.text()


def times(half: Half) -> str:
    """``$1 * $2``."""
    write = _Writer(half)
    write.fma("$1", "$2", None, "$0")
    return write.text()


def _integer(
    write: _Writer, word: str, high: str | None, bits: int, place: int, to: str, offset: int | None = None
) -> str:
    """The code whose bits begin at ``place``; its highest bit, if it lies in another word, two places further."""
    half, width = write.half, bits + (high is not None)
    offset = 1 << (width - 1) if offset is None else offset
    # Words are moved by few different distances, so that copies are shared.
    room = half.mantissa - width
    step = room // bits * bits + bits
    shift = place // step * step
    at = place - shift
    found = write.pick(write.shift(word, shift), ((1 << bits) - 1) << at, half.bits(half.units))
    if high is not None:
        # The bit after the word's last is its first.
        shift_high = shift - 16 if place + 2 >= 16 else shift
        found = write.pick(write.shift(high, shift_high), 1 << (at + 2), found)
    return write.fma(found, 2.0**-at, -(half.units * 2.0**-at + offset), to)


def _wide_byte(write: _Writer, word: str, place: int, to: str) -> str:
    """A byte for a mantissa of 7 bits: its low bits, less a number that its high bit chooses."""
    base = write.half.bits(write.half.units)
    moved = write.shift(word, place)
    low = write.pick(moved, 0x7F, base)
    return write.fma(write.pick(moved, 0x80, base, inverted=True), -1.0, low, to)


def _pair(bits: int) -> str:
    return f"0x{bits << 16 | bits:08x}"
