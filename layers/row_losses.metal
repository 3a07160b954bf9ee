kernel void row_losses() {
    #include "row.metal"
    uint id = ids[row];
    for (uint at = thread_index_in_threadgroup; at < V; at += 512) {
        float p = metal::exp((float(x[at]) / heat - peak) - log_total);
        out[size_t(row) * V + at] = static_cast<T>(((at == id ? 1.0f : 0.0f) - p) * SCALE);
    }
    if (thread_index_in_threadgroup == 0) {
        float logprob = (float(x[id]) / heat - peak) - log_total;
        float change = ON_POLICY ? 0.0f : logprob - old_logprobs[row];
        float ratio = metal::exp(metal::min(change, float(HIGHEST))), advantage = advantages[row];
        float clipped = metal::max(metal::min(ratio, clip[1]), clip[0]);
        float free = ratio * advantage, held = clipped * advantage;  // the rule of grpo.clipped_term
        bool moves = free <= held || ratio == clipped;
        losses[row] = -metal::min(free, held);
        slopes[row] = moves && change <= HIGHEST ? -ratio * advantage : 0.0f;
        logprobs[row] = logprob;
        entropies[row] = log_total - moment / total;
    }
}
