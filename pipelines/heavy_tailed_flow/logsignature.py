"""Truncated log-signatures of piecewise-linear paths, in Lyndon words: batched torch, no dependency, differentiable.

The signature of a path X with d channels has, for every word w = i1…ik, the coefficient ∫_{s1<…<sk} dX^i1 … dX^ik; its
tensor logarithm is determined by the coefficients of the Lyndon words, ordered by (length, alphabet). This basis is
called "words" (Signatory's mode "words", pysiglib's method 1). The basis of Lyndon *brackets* is another one: for d = 2
they first differ at depth 5.

:func:`logsignature` takes any path: Chen's identity with the fused multiply-exponentiate of Kidger and Lyons,
"Signatory" (ICLR 2021, section 4.1), then log S = Σ_k (-1)^(k+1) (S - 1)^k / k.

:func:`clock_logsignature` takes X_s = (s, L_s) on a time grid that all samples share, where a word with one letter 1 is
linear in L and a word with two is a quadratic form, so that depth 3 is one matrix product. With s in [0, 1], B_k the
Bernoulli polynomials, J = L_1 - L_0 and F = L - (L_0 + L_1)/2 (not in a paper known to us)::

    0^k 1   ∫ B_k(s)/k! dL_s
    0 1^k   (-1)^k J^k ∫ B_k((L_s - L_0)/J)/k! ds, so that 011 = ½ ∫ F² ds - J²/24 and 0111 = -1/6 ∫ (F³ - F J²/4) ds

Differs from the paper in: nothing that is known; the paper's depth, basis and grid are not.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from genkit.errors import ConfigError, MissingExtraError, nearest

__all__ = ["BACKENDS", "clock_logsignature", "logsignature", "lyndon_words"]

Word = tuple[int, ...]

_CLOSED_DEPTH = 4  # to this depth the clock path needs no walk along the path
_MAX_CELLS = 128  # a longer grid's table of quadratic forms would cost more than it saves


@lru_cache(maxsize=64)
def lyndon_words(d: int, depth: int) -> tuple[Word, ...]:
    """The Lyndon words over {0, …, d-1} of length 1 to ``depth``, ordered by (length, alphabet).

    Equation: Duval's algorithm; there are (1/k) Σ_{q|k} μ(q) d^(k/q) words of length k.
    """
    _check_size(d, depth)
    words, word = [], [-1]
    while word:
        word[-1] += 1
        words.append(tuple(word))
        repeated = (word * (depth // len(word) + 1))[:depth]
        while repeated and repeated[-1] == d - 1:
            repeated.pop()
        word = repeated
    return tuple(sorted(words, key=lambda w: (len(w), w)))


def _check_size(d: int, depth: int) -> None:
    if not isinstance(d, int) or d < 1:
        raise ConfigError(f"a path needs at least 1 channel, got d = {d!r}")
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise ConfigError(f"depth is {depth!r}, expected a whole number of at least 1 (2 to 5 are usual)")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(known)}.{nearest(value, known)}")


def _computable(path: Tensor) -> Tensor:
    """The path in float32 or float64: half precision is upcast, because products of increments cancel."""
    if not path.is_floating_point():
        raise ConfigError(f"a path must hold floating-point numbers, got {path.dtype}; call .float() on it")
    return path if path.dtype in (torch.float32, torch.float64) else path.float()


def logsignature(path: Tensor, depth: int, basis: str = "words", backend: str = "builtin") -> Tensor:
    """The truncated log-signature of each path.

    Args:
        path: (B, L, d), piecewise linear through its L ≥ 1 points; bf16 and fp16 are computed in float32.
        depth: length of the longest word.
        basis: "words", the coefficients of the Lyndon words in log S (the only one so far).
        backend: "builtin", or "pysiglib" or "signatory" where those are installed.

    Returns:
        (B, n_words), the words in the order of :func:`lyndon_words`, float32 or float64 as the input. A path of one
        point gives zeros. A nan or infinity in a path gives nan in its own row only; nothing else is checked.

    Raises:
        ConfigError: a wrong shape, dtype, depth, basis or backend.
        MissingExtraError: the backend's package is not installed.
    """
    _check_choice("basis", basis, ("words",))
    _check_choice("backend", backend, BACKENDS)
    if path.ndim != 3 or path.shape[1] < 1:
        raise ConfigError(f"a batch of paths has shape (B, L >= 1, d), got {tuple(path.shape)}")
    words = lyndon_words(path.shape[2], depth)
    path = _computable(path)
    if path.shape[0] == 0 or path.shape[1] == 1:
        return path.new_zeros(path.shape[0], len(words))
    return _COMPUTE[backend](path, depth)


def _builtin(path: Tensor, depth: int) -> Tensor:
    # the batch is the last dimension, so that every elementary product runs over contiguous memory
    increments = path.diff(dim=1).permute(1, 2, 0).contiguous()
    fractions = [increments / k for k in range(1, depth + 1)]
    signature = _exponential([part[0] for part in fractions])
    for i in range(1, len(increments)):
        signature = _multiply_exponential(signature, [part[i] for part in fractions])
    log = _logarithm(signature)
    d = path.shape[2]
    return torch.stack([log[len(w) - 1][_row(w, d)] for w in lyndon_words(d, depth)], dim=1)


def _row(word: Word, d: int) -> int:
    """The word's row in its level."""
    return functools.reduce(lambda row, letter: row * d + letter, word, 0)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """The tensor product of levels (p, B) and (q, B): (p q, B)."""
    return (left.unsqueeze(1) * right.unsqueeze(0)).flatten(0, 1)


def _exponential(fractions: list[Tensor]) -> list[Tensor]:
    """Levels 1 … depth of exp(dx), from dx/1, …, dx/depth, each (d, B)."""
    levels = fractions[:1]
    for fraction in fractions[1:]:
        levels.append(_outer(levels[-1], fraction))
    return levels


def _multiply_exponential(signature: list[Tensor], fractions: list[Tensor]) -> list[Tensor]:
    """S ⊗ exp(dx) in Horner form: level n is S_n + (S_{n-1} + (… (S_1 + dx/n) ⊗ dx/(n-1) …)) ⊗ dx."""
    result = []
    for n, level in enumerate(signature):
        total = fractions[n]
        for k in range(n):
            total = _outer(signature[k] + total, fractions[n - k - 1])
        result.append(level + total)
    return result


def _logarithm(signature: list[Tensor]) -> list[Tensor]:
    """The levels of y_1 = log(1 + x), where y_k = x/k - x ⊗ y_{k+1} and x = S - 1 has the levels of S."""
    depth = len(signature)
    log: list[Tensor] = []  # y_{k+1}, to the level that still matters
    for k in range(depth, 0, -1):
        levels = [level / k for level in signature[: depth - k + 1]]
        for n in range(1, len(levels)):
            levels[n] = levels[n] - sum(_outer(signature[j], log[n - j - 1]) for j in range(n))
        log = levels
    return log


@dataclass(frozen=True)
class _ClockTable:
    """The linear functionals and quadratic forms of one grid, acting on F = L - L_0 at the grid's points.

    ``matrix`` (L, n_linear + n_quadratic L) holds first the words 1, 01, 001, … and the integral ∫ F ds, then one
    symmetric (L, L) block for each word with two ones.
    """

    matrix: Tensor
    widths: Tensor  # cell widths over the span
    linear: tuple[Word, ...]
    quadratic: tuple[Word, ...]
    scale: Tensor  # span^(number of zeros), one for each Lyndon word


def _check_times(times: tuple[float, ...]) -> None:
    finite = all(math.isfinite(s) for s in times)
    if not finite or any(b < a for a, b in itertools.pairwise(times)):
        raise ConfigError(f"times must be finite and non-decreasing, got {list(times)}")


def _differences(points: int) -> Tensor:
    """The (L-1, L) matrix that takes values to increments."""
    identity = torch.eye(points, dtype=torch.float64)
    return identity[1:] - identity[:-1]


@lru_cache(maxsize=32)
def _clock_table(times: tuple[float, ...], depth: int, dtype: torch.dtype, device: torch.device) -> _ClockTable:
    """Tabulates the grid in float64 with the general algorithm, on unit increments and on sums of two of them."""
    s = torch.tensor(times, dtype=torch.float64, device="cpu")
    span = times[-1] - times[0]
    s = (s - s[0]) / (span if span > 0 else 1.0)
    unit = torch.eye(len(times) - 1, dtype=torch.float64)
    first, second = torch.combinations(torch.arange(len(unit)), 2).unbind(1)
    increments = torch.cat((unit, unit[first] + unit[second]))
    values = torch.cat((torch.zeros_like(increments[:, :1]), increments.cumsum(1)), dim=1)
    coefficients = _builtin(torch.stack((s.expand_as(values), values), dim=-1), depth)
    single, pair = coefficients.split((len(unit), len(first)))

    words, difference = lyndon_words(2, depth), _differences(len(times))
    linear = tuple(w for w in words if sum(w) == 1)
    quadratic = tuple(w for w in words if sum(w) == 2)
    columns = [difference.T @ single[:, words.index(w)].unsqueeze(1) for w in linear]
    columns.append(((s.diff() @ difference.abs()) / 2).unsqueeze(1))
    for w in quadratic:
        of_one, of_two = single[:, words.index(w)], pair[:, words.index(w)]
        form = torch.diag(of_one)
        form[first, second] = form[second, first] = (of_two - of_one[first] - of_one[second]) / 2
        columns.append(difference.T @ form @ difference)
    scale = torch.tensor([span ** w.count(0) for w in words], dtype=torch.float64)
    matrix, widths, scale = (x.to(device, dtype) for x in (torch.cat(columns, dim=1), s.diff(), scale))
    return _ClockTable(matrix, widths, linear, quadratic, scale)


def clock_logsignature(times: Tensor, values: Tensor, depth: int) -> Tensor:
    """``logsignature`` of the paths (s, L_s) on one shared grid, by a matrix product to depth 4.

    Args:
        times: (L,), the grid s_0 ≤ … ≤ s_{L-1} (its tables are kept for the last 32 grids; best on the CPU).
        values: (B, L), L_s at the grid's points; bf16 and fp16 are computed in float32.
        depth: length of the longest word; from 5 on, and beyond 128 cells, the general algorithm runs.

    Returns:
        (B, n_words), the words of :func:`lyndon_words` with d = 2 and the letter 0 for time.

    Raises:
        ConfigError: shapes that do not match, times that decrease or are not finite, an integer dtype.
    """
    if times.ndim != 1 or values.ndim != 2 or len(times) < 1 or values.shape[1] != len(times):
        raise ConfigError(f"expected times (L,) and values (B, L), got {tuple(times.shape)} and {tuple(values.shape)}")
    _check_size(2, depth)
    values = _computable(values)
    grid = tuple(times.tolist())
    _check_times(grid)
    if depth > _CLOSED_DEPTH or len(grid) > _MAX_CELLS + 1 or 0 in (len(values), len(grid) - 1):
        return logsignature(torch.stack((times.to(values).expand_as(values), values), dim=-1), depth)
    with torch.autocast(values.device.type, enabled=False):  # autocast would run the product in half precision
        return _from_table(_clock_table(grid, depth, values.dtype, values.device), values - values[:, :1], depth)


def _from_table(table: _ClockTable, path: Tensor, depth: int) -> Tensor:
    """The words of paths (B, L) that start at 0."""
    product = path @ table.matrix
    count = len(table.linear) + 1
    found = {w: product[:, i] for i, w in enumerate(table.linear)}
    found[(0,)] = torch.ones_like(product[:, 0])
    for i, w in enumerate(table.quadratic):
        start = count + i * path.shape[1]
        found[w] = (product[:, start : start + path.shape[1]] * path).sum(1)
    if depth >= 4:
        found[(0, 1, 1, 1)] = _word_0111(path, found[(1,)], product[:, count - 1], table.widths)
    return torch.stack([found[w] for w in lyndon_words(2, depth)], dim=1) * table.scale


def _word_0111(path: Tensor, total: Tensor, integral: Tensor, widths: Tensor) -> Tensor:
    """-1/6 ∫ (F³ - F J²/4) ds, exact on piecewise-linear F: ∫ F³ over a cell is h (a + b)(a² + b²)/4."""
    centred = path - total.unsqueeze(1) / 2
    squared = centred * centred
    cubic = ((centred[:, 1:] + centred[:, :-1]) * (squared[:, 1:] + squared[:, :-1])) @ widths / 4
    return (total * total / 4 * (integral - total / 2) - cubic) / 6


def _pysiglib(path: Tensor, depth: int) -> Tensor:
    try:
        import pysiglib
        from pysiglib import torch_api
    except ImportError as error:
        raise _missing("pysiglib") from error
    _prepare_pysiglib(pysiglib.prepare_log_sig, path.shape[2], depth)
    return torch_api.log_sig(path.contiguous(), depth, method=1)


@lru_cache(maxsize=64)
def _prepare_pysiglib(prepare: Callable[..., None], d: int, depth: int) -> None:
    prepare(d, depth, method=1)


def _signatory(path: Tensor, depth: int) -> Tensor:
    try:
        import signatory
    except ImportError as error:
        raise _missing("signatory") from error
    return signatory.logsignature(path, depth, mode="words")


def _missing(name: str) -> MissingExtraError:
    how = (
        "pip install 'genkit-diffusion[pysiglib]'"
        if name == "pysiglib"
        else ("pip install --no-build-isolation --no-deps signatory (compiles for about ten minutes)")
    )
    return MissingExtraError(f"the log-signature backend {name!r} needs the package {name}: {how}, or use 'builtin'")


_COMPUTE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "builtin": _builtin,
    "pysiglib": _pysiglib,
    "signatory": _signatory,
}
BACKENDS = tuple(_COMPUTE)
