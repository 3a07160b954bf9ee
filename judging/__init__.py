"""What a judge is made of besides its model: rubrics, labels, judges elsewhere."""
