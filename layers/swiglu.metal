// A thread computes one element.
kernel void swiglu() {
    uint at = thread_position_in_grid.x;
    if (at >= uint(gate_up_shape[0]) * F) return;
    uint row = at / F, column = at % F;
    float gate = float(gate_up[size_t(row) * 2 * F + column]);
    float up = float(gate_up[size_t(row) * 2 * F + F + column]);
    out[at] = static_cast<T>(gate / (1.0f + metal::exp(-gate)) * up);
}
