"""What is for sale: offers with prices and dates."""
