"""What a trained model is used for: prediction, generation and export."""
