// A thread makes one element: d logprob[id] = onehot - p, d entropy = -p (log p + entropy).
kernel void row_logprobs_vjp() {
    uint column = thread_position_in_grid.x, row = thread_position_in_grid.y;
    if (column >= V) return;
    size_t begin = size_t(row) * V;
    float heat = temperature[0];
    float logprob = (float(logits[begin + column]) / heat - highest[row]) - log_totals[row];
    float p = metal::exp(logprob);
    float d = p > 0.0f ? -p * (d_logprobs[row] + d_entropies[row] * (logprob + entropies[row])) : 0.0f;
    if (column == uint(ids[row])) d += d_logprobs[row];
    d_logits[begin + column] = static_cast<T>(d / heat);
}
