"""Triton: the SSD scan of both directions in one launch, from convolved inputs and raw step sizes.

Shapes: b sequences, l tokens, h heads, p headdim, g groups, n state, c = h p + 2 g n channels (x, B, C).

A program walks a head along its sequence in blocks of tokens and keeps the state S (n, p) in registers:

    y_i = sum_{j <= i} (C_i·B_j) exp(cum_i - cum_j) dt_j x_j + exp(cum_i) C_i S + D x_i,
    S  <- exp(cum_end) S + sum_j exp(cum_end - cum_j) dt_j B_j x_j^T,

sums within the block. Time is linear in l, the decay matrix never leaves the registers, and a sequence of one block
needs no state. Direction 1 starts at the last token: only addresses differ, nothing is flipped.

Reference: :func:`backbones.ops.ssd_recurrent`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """a b in float32 from operands of one dtype; Triton's interpreter multiplies the bits of bfloat16, so widened."""
    if EMULATED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _step(dt, bias, inside):
    """The raw step size and its softplus, exact where it is small; 0 beyond the sequence."""
    raw = dt + bias
    tail = tl.exp(-tl.abs(raw))
    over = 1.0 + tail
    log = tl.where(over == 1.0, tail, tl.log(over) * tail / tl.where(over == 1.0, 1.0, over - 1.0))
    return raw, tl.where(inside, tl.maximum(raw, 0.0) + log, 0.0)


@triton.jit
def _tokens(position, length, direction):
    """Where the tokens at these places of a scan stand in memory, and which of them there are."""
    return tl.where(direction == 0, position, length - 1 - position), position < length


@triton.jit
def _inputs(
    xBC, dt, bias, A, head, group, token, inside,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, DT_STRIDE: tl.constexpr,
    HEADDIM: tl.constexpr, STATE: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A block's raw and own step sizes, cumulative decay, x (BLOCK, P), B and C (BLOCK, N), and the latter's masks."""
    raw, step = _step(tl.load(dt + token * DT_STRIDE + head, mask=inside, other=0.0).to(tl.float32), bias, inside)
    p, n = tl.arange(0, P), tl.arange(0, N)
    x_mask, n_mask = inside[:, None] & (p < HEADDIM)[None, :], inside[:, None] & (n < STATE)[None, :]
    at = xBC + token[:, None] * CHANNELS
    B_at = at + HEADS * HEADDIM + group * STATE + n[None, :]
    x_t = tl.load(at + head * HEADDIM + p[None, :], mask=x_mask, other=0.0)
    B_t = tl.load(B_at, mask=n_mask, other=0.0)
    C_t = tl.load(B_at + GROUPS * STATE, mask=n_mask, other=0.0)
    return raw, step, tl.cumsum(step * A, 0), x_t, B_t, C_t, x_mask, n_mask


@triton.jit
def _forward_kernel(
    xBC, dt, dt_bias, A_log, D, y, length,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, DT_STRIDE: tl.constexpr,
    HEADDIM: tl.constexpr, STATE: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, MANY: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    head, sequence, direction = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = (direction * tl.num_programs(1) + sequence).to(tl.int64) * length
    group = head // (HEADS // GROUPS)
    p, u = tl.arange(0, P), tl.arange(0, BLOCK)
    A = -tl.exp(tl.load(A_log + direction * HEADS + head))
    bias, skip = tl.load(dt_bias + direction * HEADS + head), tl.load(D + direction * HEADS + head)
    xBC += first * CHANNELS
    y += first * HEADS * HEADDIM + head * HEADDIM
    dt += sequence.to(tl.int64) * length * DT_STRIDE
    earlier = u[:, None] >= u[None, :]
    state = tl.zeros((N, P), tl.float32)
    for start in range(0, length, BLOCK):
        token, inside = _tokens(start + u, length, direction)
        _, step, cum, x_t, B_t, C_t, x_mask, _ = _inputs(
            xBC, dt, bias, A, head, group, token, inside,
            HEADS, CHANNELS, DT_STRIDE, HEADDIM, STATE, GROUPS, P, N,
        )  # fmt: skip
        low = x_t.dtype
        xdt = (x_t.to(tl.float32) * step[:, None]).to(low)
        decay = tl.exp(tl.where(earlier, cum[:, None] - cum[None, :], float("-inf")))
        M = (_dot(C_t, tl.trans(B_t), PRECISION, EMULATED) * decay).to(low)
        y_t = _dot(M, xdt, PRECISION, EMULATED) + x_t.to(tl.float32) * skip
        if MANY:
            y_t += _dot(C_t, state.to(low), PRECISION, EMULATED) * tl.exp(cum)[:, None]
            end = tl.sum(step * A, 0)
            fading = (xdt.to(tl.float32) * tl.exp(end - cum)[:, None]).to(low)
            state = state * tl.exp(end) + _dot(tl.trans(B_t), fading, PRECISION, EMULATED)
        tl.store(y + token[:, None] * (HEADS * HEADDIM) + p[None, :], y_t, mask=x_mask)


@triton.jit
def _backward_kernel(
    xBC, dt, dt_bias, A_log, D, dy, dxBC, dBC, ddt, dA, dD, rows, length,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, DT_STRIDE: tl.constexpr, EACH: tl.constexpr,
    HEADDIM: tl.constexpr, STATE: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, MANY: tl.constexpr,
    PRECISION: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """The gradients of EACH heads of a group, one after the other, so that those of B and C are summed on the way.

    Along the scan with S, then back with its gradient. With G = dM * M and r and c the sums of its rows and columns
    (the diagonal, which would cancel, left out), the gradient of cum is r - c, and that of dt_k A is its sum over all
    tokens from k on.
    """
    share, sequence, direction = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = (direction * tl.num_programs(1) + sequence).to(tl.int64)
    first = line * length
    shares = HEADS // GROUPS // EACH  # of a group
    group = share // shares
    p, n, u = tl.arange(0, P), tl.arange(0, N), tl.arange(0, BLOCK)
    earlier = u[:, None] >= u[None, :]
    before = u[:, None] > u[None, :]
    xBC += first * CHANNELS
    dxBC += first * CHANNELS
    dy += first * HEADS * HEADDIM
    dt += sequence.to(tl.int64) * length * DT_STRIDE
    ddt += first * HEADS
    # (shares, 2, b, l, 2, g, n)
    tokens = tl.num_programs(2) * tl.num_programs(1) * length
    dB = dBC + ((share % shares).to(tl.int64) * tokens + first) * 2 * GROUPS * STATE + group * STATE
    blocks = tl.cdiv(length, BLOCK)
    for k in range(EACH):
        head = share * EACH + k
        A = -tl.exp(tl.load(A_log + direction * HEADS + head))
        bias, skip = tl.load(dt_bias + direction * HEADS + head), tl.load(D + direction * HEADS + head)
        row = rows + (line * HEADS + head) * length

        state = tl.zeros((N, P), tl.float32)
        for block in range(blocks):
            position = block * BLOCK + u
            token, inside = _tokens(position, length, direction)
            _, step, cum, x_t, B_t, C_t, x_mask, n_mask = _inputs(
                xBC, dt, bias, A, head, group, token, inside,
                HEADS, CHANNELS, DT_STRIDE, HEADDIM, STATE, GROUPS, P, N,
            )  # fmt: skip
            dy_at = dy + head * HEADDIM + token[:, None] * (HEADS * HEADDIM) + p[None, :]
            dy_t = tl.load(dy_at, mask=x_mask, other=0.0)
            low = x_t.dtype
            xdt = (x_t.to(tl.float32) * step[:, None]).to(low)
            decay = tl.exp(tl.where(earlier, cum[:, None] - cum[None, :], float("-inf")))
            scores = _dot(C_t, tl.trans(B_t), PRECISION, EMULATED)
            dscores = _dot(dy_t, tl.trans(xdt), PRECISION, EMULATED) * decay
            r = tl.sum(tl.where(before, dscores * scores, 0.0), 1)
            dC_t = _dot(dscores.to(low), B_t, PRECISION, EMULATED)
            if MANY:
                by_state = _dot(dy_t, tl.trans(state.to(low)), PRECISION, EMULATED) * tl.exp(cum)[:, None]
                r += tl.sum(C_t.to(tl.float32) * by_state, 1)
                dC_t += by_state
                end = tl.sum(step * A, 0)
                fading = (xdt.to(tl.float32) * tl.exp(end - cum)[:, None]).to(low)
                state = state * tl.exp(end) + _dot(tl.trans(B_t), fading, PRECISION, EMULATED)
            tl.store(row + position, r, mask=inside)
            dC_at = dB + token[:, None] * (2 * GROUPS * STATE) + GROUPS * STATE + n[None, :]
            dC_t += tl.load(dC_at, mask=n_mask & (k > 0), other=0.0)
            tl.store(dC_at, dC_t, mask=n_mask)
        tl.debug_barrier()  # rows are read by other threads

        dstate = tl.zeros((N, P), tl.float32)
        later, A_sum, D_sum = 0.0, 0.0, 0.0
        for i in range(blocks):
            position = (blocks - 1 - i) * BLOCK + u
            token, inside = _tokens(position, length, direction)
            raw, step, cum, x_t, B_t, C_t, x_mask, n_mask = _inputs(
                xBC, dt, bias, A, head, group, token, inside,
                HEADS, CHANNELS, DT_STRIDE, HEADDIM, STATE, GROUPS, P, N,
            )  # fmt: skip
            dy_at = dy + head * HEADDIM + token[:, None] * (HEADS * HEADDIM) + p[None, :]
            dy_t = tl.load(dy_at, mask=x_mask, other=0.0)
            low = x_t.dtype
            wide = x_t.to(tl.float32)
            xdt = (wide * step[:, None]).to(low)
            # rows are inputs j, columns outputs i
            decay = tl.exp(tl.where(tl.trans(earlier), cum[None, :] - cum[:, None], float("-inf")))
            scores = _dot(B_t, tl.trans(C_t), PRECISION, EMULATED)
            dscores = _dot(xdt, tl.trans(dy_t), PRECISION, EMULATED) * decay
            c = tl.sum(tl.where(tl.trans(before), dscores * scores, 0.0), 1)
            dB_t = _dot(dscores.to(low), C_t, PRECISION, EMULATED)
            dxdt = _dot((scores * decay).to(low), dy_t, PRECISION, EMULATED)
            if MANY:
                wanted = dstate.to(low)
                end = tl.sum(step * A, 0)
                until = tl.exp(end - cum)[:, None]
                dxdt += _dot(B_t, wanted, PRECISION, EMULATED) * until
                by_state = _dot(xdt, tl.trans(wanted), PRECISION, EMULATED) * until
                c += tl.sum(B_t.to(tl.float32) * by_state, 1)
                dB_t += by_state
                fading = (dy_t.to(tl.float32) * tl.exp(cum)[:, None]).to(low)
                dstate = dstate * tl.exp(end) + _dot(tl.trans(C_t), fading, PRECISION, EMULATED)
            dB_at = dB + token[:, None] * (2 * GROUPS * STATE) + n[None, :]
            dB_t += tl.load(dB_at, mask=n_mask & (k > 0), other=0.0)
            tl.store(dB_at, dB_t, mask=n_mask)

            dcum = tl.load(row + position, mask=inside, other=0.0) - c
            da = later + tl.cumsum(dcum, 0, reverse=True)
            later += tl.sum(dcum, 0)
            A_sum += tl.sum(da * step, 0)
            dstep = tl.sum(wide * dxdt, 1) + A * da
            tl.store(ddt + token * HEADS + head, dstep * tl.sigmoid(raw), mask=inside)
            g = dy_t.to(tl.float32)
            D_sum += tl.sum(tl.sum(g * wide, 1), 0)
            dx_at = dxBC + head * HEADDIM + token[:, None] * CHANNELS + p[None, :]
            tl.store(dx_at, dxdt * step[:, None] + g * skip, mask=x_mask)
        tl.store(dA + line * HEADS + head, A_sum)
        tl.store(dD + line * HEADS + head, D_sum)
        tl.debug_barrier()  # before the next head adds to dB and dC


FORWARD = {"BLOCK": 64, "num_warps": 8}
BACKWARD = {"BLOCK": 32, "num_warps": 8}
"""Tokens in a block and warps of a program: the largest that the compiler fits into an H100's registers."""


def _sizes(
    xBC: Tensor, dt: Tensor, headdim: int, state: int, groups: int, launch: dict[str, int]
) -> dict[str, int | str | bool]:
    """All but the length, which is the model's, and so known when a kernel is compiled."""
    length = xBC.shape[2]
    block = min(max(triton.next_power_of_2(length), 16), launch["BLOCK"])
    exact = xBC.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return {
        "HEADS": dt.shape[2], "CHANNELS": xBC.shape[3], "DT_STRIDE": dt.stride(1),
        "HEADDIM": headdim, "STATE": state, "GROUPS": groups, "MANY": length > block,
        "P": max(triton.next_power_of_2(headdim), 16), "N": max(triton.next_power_of_2(state), 16),
        "PRECISION": "ieee" if exact else "tf32", "EMULATED": not xBC.is_cuda, **launch, "BLOCK": block,
    }  # fmt: skip


def scan(
    xBC: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, D: Tensor, headdim: int, state: int, groups: int
) -> Tensor:
    """Both scans of softplus(dt + dt_bias) and A = -exp(A_log).

    Args:
        xBC: (2,b,l,c), each direction's x, B and C.
        dt: (b,l,h) raw step sizes, rows evenly spaced in memory.
        dt_bias, A_log, D: (2,h), float32.
        headdim, state, groups: p, n and g.

    Returns:
        (2,b,l,h p) in the dtype of xBC.
    """
    _, b, length, _ = xBC.shape
    heads = dt.shape[2]
    y = xBC.new_empty(2, b, length, heads * headdim)
    _forward_kernel[(heads, b, 2)](
        xBC, dt, dt_bias, A_log, D, y, length, **_sizes(xBC, dt, headdim, state, groups, FORWARD)
    )  # fmt: skip
    return y


def _heads_of_a_program(heads: int, groups: int, programs: int, device: torch.device) -> int:
    """As many heads of a group as leave every multiprocessor four programs: fewer parts of dB and dC to add up."""
    wanted = 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    each = heads // groups
    fitting = [k for k in range(1, each + 1) if each % k == 0 and programs * heads // k >= wanted]
    return max(fitting, default=1)


def scan_backward(
    dy: Tensor, xBC: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, D: Tensor,
    headdim: int, state: int, groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients for that of y (2,b,l,h p): of xBC, of dt + dt_bias (2,b,l,h), of A_log and D (2,h)."""
    _, b, length, _ = xBC.shape
    heads = dt.shape[2]
    each = _heads_of_a_program(heads, groups, 2 * b, xBC.device)
    dxBC = torch.empty_like(xBC)
    dBC = D.new_empty(heads // groups // each, 2, b, length, 2 * groups * state)
    ddt, rows = D.new_empty(2, b, length, heads), D.new_empty(2, b, heads, length)
    dA, dD = D.new_empty(2, b, heads), D.new_empty(2, b, heads)
    _backward_kernel[(heads // each, b, 2)](
        xBC, dt, dt_bias, A_log, D, dy, dxBC, dBC, ddt, dA, dD, rows, length,
        EACH=each, **_sizes(xBC, dt, headdim, state, groups, BACKWARD),
    )  # fmt: skip
    dxBC[..., heads * headdim :] = dBC.sum(0)
    return dxBC, ddt, dA.sum(1) * -A_log.exp(), dD.sum(1)
