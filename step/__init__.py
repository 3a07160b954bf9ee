"""A step's samples: generation, scoring, advantages, batches, loss, teacher."""
