/* Payloads by UCX, beside the TLS connection of their heads: not encrypted, by whatever transport
 * UCX finds between two hosts (RDMA, TCP).
 *
 * Happy path: each end has a ucp_worker of its own and tells the other its address and a token,
 * both within TLS. A payload goes in pieces, one at a time each way: an active message that says
 * the token and the piece's number, whose bytes stay with the sender until the receiver has asked
 * for them (a rendezvous), with the place where they belong.
 *
 * Failure: what has not the token, or is not the next piece, is refused before a byte of it is
 * taken. UCX says nothing of a peer that hangs; who waits has a deadline (bulk.h), and a peer that
 * dies hangs up by TLS. Whatever it is, ucx_path.close() ends what is under way: no byte is read or
 * written after it.
 *
 * A worker for each connection, of the connection's thread: one that goes wrong takes no other one
 * with it, and nothing needs a lock but what UCX's context has itself. */
#ifndef SHD_RELAY_BULK_UCX_H
#define SHD_RELAY_BULK_UCX_H

#include "daemon/relay/bulk_path.h"

/* Where UCX's headers were missing as this was built, load() says so, and nothing else is there. */
extern const struct bulk_path ucx_path;

#endif
