"""The page that shows runs: what it shows is read here, and written as one file of HTML."""
