/* The daemons of a directory and what they last said, by polling their status sockets.
 *
 * Each daemon is asked on its own, without blocking: one that does not answer costs the others
 * nothing. One that is gone stays in the list, with the reason and since when, and what it last
 * said.
 *
 * Happy path: node_open(); then, as long as one likes, node_ask(), http_client_wait(),
 * node_step();
 * node_close(). Or node_ask_once().
 */
#ifndef SHD_CTL_STATUS_NODE_H
#define SHD_CTL_STATUS_NODE_H

#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>

#include "client/ctl/base/http.h"
#include "client/ctl/base/status_doc.h"
#include "proto/base/status.h"

#define NODE_DAEMONS_MAX 1024u
#define NODE_PATH_BYTES  256u
#define NODE_STALE_MS    2000 /* as /healthz: above, the daemon's event loop is stuck */

struct node_daemon {
    char device[DOC_NAME_BYTES];
    struct http *http;  /* owned: the request under way; NULL: none */
    bool up;            /* its last answer was one */
    bool asked;         /* it has answered, or failed to, at least once */
    struct doc *doc;    /* owned: what it last said; NULL: nothing yet */
    json_t *json;       /* owned: the same; NULL unless node.keep_json */
    struct shd_err why; /* when not up */
    pid_t pid;          /* when not up: who has its socket; 0: nobody, or not known */
    const char *state;  /* of that process; "" */
    uint64_t up_ns;     /* when it last answered; 0: never */
    uint64_t down_ns;   /* when it first did not; 0: it is up */
    uint64_t next_ns;   /* ask again then */
};

struct node {
    char dir[NODE_PATH_BYTES];
    bool tcp;                    /* their names are HOST:PORT; there is no directory */
    bool listed;                 /* the daemons were named: the directory is not looked through */
    bool with_tools, keep_json;  /* set after node_open() */
    uint64_t timeout_ms;         /* of one answer */
    struct http_client client;   /* owned */
    struct node_daemon *daemons; /* owned, in natural order, or as they were named */
    uint32_t count;
};

/* Open for a verb the daemons at address, or elsewhere. Returns CTL_OK, or the exit code: it has
 * said why.
 *
 *   address  "DIR" or "DIR?cpu0,cpu1". NULL: as where_find() says.
 *   hosts    "HOST:PORT,..." of daemons that listen on TCP (shardd --status-address), instead of
 *            address; NULL: none.
 *
 * The code is CTL_USAGE when the command line does not say where (malformed, or several runs). */
int node_open(const char *address, const char *hosts, struct node *ret_node);

/* Those at address, which is not NULL; the words are the caller's. Errors: SHD_ENOENT there is
 * none, and as node_scan(). */
int node_open_at(const char *address, struct node *ret_node, struct shd_err *e);
void node_close(struct node *n);

/* The same for who waits for daemons: of a directory nothing needs to be there yet. */
int node_open_early(const char *address, struct node *ret_node);

/* The way out of a verb with an error of its node: says it, returns the exit code. */
int node_fail(int status, const struct shd_err *e);

/* "2", "0.5": seconds between two questions, from 0.1 to 3600, as milliseconds. Errors: SHD_EINVAL,
 * SHD_ERANGE. */
int node_interval(const char *text, uint64_t *ret_ms, struct shd_err *e);

/* The flag of verbs that read daemons elsewhere. */
#define HOST_FLAG(to)                                                                 \
    {                                                                                 \
        "host", 'H', FLAG_STRING, "HOST:PORT,...",                                    \
            "daemons elsewhere, by the --status-address each listens on", &(to), 0, 0 \
    }

/* The name of a daemon's status socket, as http_start() takes it. */
#define NODE_SOCKET_BYTES (NODE_PATH_BYTES + DOC_NAME_BYTES + 8)
void node_socket(const struct node *n, const struct node_daemon *d,
                 char ret_socket[NODE_SOCKET_BYTES]);

/* Look for new daemons; those known stay. Errors: SHD_ENOENT no directory; SHD_EAUTH it may not be
 * read; SHD_ERANGE, SHD_ENOMEM. */
int node_scan(struct node *n, struct shd_err *e);

/* Forget daemons that are not named and have no socket any more: they ended as they were told. One
 * that was killed leaves them. No request may be under way. */
void node_forget_gone(struct node *n);

/* Begin to ask all whose time has come; they are asked again after interval_ms. */
void node_ask(struct node *n, uint64_t interval_ms);

/* Take what has come. True: something is new. */
bool node_step(struct node *n);

/* Ask all, until each has answered or failed. */
void node_ask_once(struct node *n);

/* A document from elsewhere (the control connection) as d's answer. */
void node_take(struct node *n, struct node_daemon *d, const char *text, size_t bytes);

/* True for a daemon that is up, with a loop that goes on and no model refused. why[bytes] says what
 * is not so. */
bool node_healthy(const struct node_daemon *d, char *why, size_t bytes);

/* Of each daemon. */
uint32_t node_up(const struct node *n);

#endif
