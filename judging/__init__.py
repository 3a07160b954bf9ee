"""What a judge is made of besides its model: rubrics, the walk through a tree of prompts, judges elsewhere."""
