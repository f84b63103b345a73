"""Parts of a report, without a word on how it is shown: `model`, numbers and names as text, the look of figures."""
