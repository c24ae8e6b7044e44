/* The relay beside daemons: a connection that another host's relay has made. */
#ifndef SHD_RELAY_SERVE_H
#define SHD_RELAY_SERVE_H

struct relay;

/* Thread: serve the accepted TCP socket of *(struct stranger *)arg (a heap's, freed) until either
 * side hangs up. It is a stranger that is heard, and none any more when its key is known, or the
 * wrong one. */
void serve_connection(struct relay *relay, void *arg);

#endif
