"""Studies: many runs that answer one question, as conf/study/<name>.yaml says."""
