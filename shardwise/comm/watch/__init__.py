"""What watches communication: the log of `trace_comm`, and debug mode, in which ranks compare before they communicate.

In the order of imports, which go down only:

    meeting  ranks tell each other, through the job's store, what they are about to communicate
    log      `trace_comm`: a recorder around either transport
    debug    `debug_mode`: a transport that compares the ranks before each communication
"""
