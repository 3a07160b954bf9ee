"""The samples of a step: generation, scoring, advantages, batches, loss, teacher."""
