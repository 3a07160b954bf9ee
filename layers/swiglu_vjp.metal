// A thread computes the gradients of the two inputs of one element of the result.
kernel void swiglu_vjp() {
    uint at = thread_position_in_grid.x;
    if (at >= uint(gate_up_shape[0]) * F) return;
    uint row = at / F, column = at % F;
    size_t low = size_t(row) * 2 * F + column, high = low + F;
    float gate = float(gate_up[low]), up = float(gate_up[high]), d = float(cotangent[at]);
    float open = 1.0f / (1.0f + metal::exp(-gate));
    d_gate_up[low] = static_cast<T>(d * up * open * (1.0f + gate * (1.0f - open)));
    d_gate_up[high] = static_cast<T>(d * gate * open);
}
