"""Google's TPUs."""
