"""What a rule is, the table of rules, and the decision how an operator runs: layouts in, layouts out. Pure.

In the order of imports, which go down only:

    notation     what a rule is: a sentence about one mesh axis, and the words beside it
    table        the one table: operator to rule; which Shardwise this is, for keys of compiled programs
    operator     one operator overload with its schema and its row
    decide       rule and layouts to the cheapest decision
"""
