/* Inside the communicator thread (comm.h): its links. comm.c has the thread and what is asked of
 * it, comm_link.c what is done about one link. Everything here is the thread's unless said. */
#ifndef SHD_COMM_LINK_H
#define SHD_COMM_LINK_H

#include <pthread.h>
#include <stdbool.h>

#include "proto/gpu/comm.h"
#include "proto/gpu/cuda.h"

enum link_state {
    LINK_NEW,
    LINK_INIT,     /* NCCL connects */
    LINK_READY,    /* no turn is under way */
    LINK_ISSUED,   /* NCCL has the turn at hand */
    LINK_RUNNING,  /* the device has it: its event is awaited */
    LINK_DRAINING, /* aborted: the device is to let go */
    LINK_BROKEN,
};

struct comm_link {
    struct comm *comm; /* borrowed */
    struct comm_link *next;
    struct comm_job *incoming; /* under the lock: newest first */
    bool ending;               /* under the lock */
    /* The thread's: */
    struct nccl_id id;
    int rank;
    enum link_state state;
    bool end_seen;
    struct comm_job *opened; /* until it was called */
    struct comm_job *queue;  /* by turn */
    uint64_t turn;           /* the next, or the one under way: the queue's first then */
    uint64_t deadline_ns;    /* of the state */
    uint64_t looked_ns;      /* the last step */
    struct ncclComm *nccl;
    CUstream stream;
    CUevent event;
    struct shd_err why; /* why it broke */
    bool ended;         /* for comm_link_end() */
    bool remote;        /* for the peer's end, which knows why */
};

struct id_request {      /* on its caller's stack */
    struct nccl_id *ids; /* [count] */
    uint32_t count;
    int status;
    struct shd_err why;
    bool done;
};

struct comm {
    struct comm *next; /* under the table's lock, with refs */
    uint32_t refs;
    uint32_t ordinal;
    pthread_t thread;
    pthread_mutex_t lock; /* of the next three, and of what links say */
    pthread_cond_t work, made;
    struct comm_link *fresh;   /* newest first */
    struct id_request *wanted; /* NULL: none */
    bool leaving;
    /* The thread's: */
    struct comm_link *links;
    const struct cuda *cuda;
    const struct nccl *nccl;
    CUdevice device;
    CUcontext context;
};

/* The context, and NCCL, unless they are there. */
int comm_take_libraries(struct comm *c, struct shd_err *e);

/* Do what can be done now. */
void comm_link_step(struct comm_link *l);

/* True: a turn is ready to begin but for its gate. */
bool comm_link_gated(const struct comm_link *l);

/* True: something is under way, or can begin at once. */
bool comm_link_busy(const struct comm_link *l);

/* One that is broken, and has no jobs. */
void comm_link_free(struct comm_link *l);

#endif
