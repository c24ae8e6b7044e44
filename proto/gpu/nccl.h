/* The part of NCCL that is used, declared here so that building needs none of its headers, and
 * loaded at run time, so that a host without it runs everything else. The declarations are those of
 * NCCL 2.18 and later; where <nccl.h> is found the tests hold them against it
 * (tests/cuda/nccl_header.c).
 *
 * Not thread-safe: one thread of a process makes all calls (proto/gpu/comm.h).
 */
#ifndef SHD_NCCL_H
#define SHD_NCCL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#define NCCL_ID_BYTES       128u
#define NCCL_VERSION_MIN    21800u /* 2.18.0 */
#define NCCL_CONFIG_MAGIC   0xcafebeefu
#define NCCL_CONFIG_VERSION 21800u /* of the members below: a later library sets the others */
#define NCCL_UNDEFINED      INT32_MIN

struct CUstream_st;
struct ncclComm;

struct nccl_id { /* ncclUniqueId */
    char bytes[NCCL_ID_BYTES];
};

enum nccl_result { /* ncclResult_t */
                   NCCL_SUCCESS = 0,
                   NCCL_UNHANDLED_CUDA_ERROR = 1,
                   NCCL_SYSTEM_ERROR = 2,
                   NCCL_INTERNAL_ERROR = 3,
                   NCCL_INVALID_ARGUMENT = 4,
                   NCCL_INVALID_USAGE = 5,
                   NCCL_REMOTE_ERROR = 6,
                   NCCL_IN_PROGRESS = 7,
};

enum { NCCL_UINT8 = 1 }; /* ncclDataType_t */

struct nccl_config { /* ncclConfig_t, its beginning */
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
    int traffic_class; /* of later versions: undefined */
};

/* X(member, symbol, result, arguments) */
#define NCCL_FUNCTIONS(X)                                                                   \
    X(get_version, "ncclGetVersion", int, (int *version))                                   \
    X(get_unique_id, "ncclGetUniqueId", int, (struct nccl_id * id))                         \
    X(comm_init, "ncclCommInitRankConfig", int,                                             \
      (struct ncclComm * *comm, int ranks, struct nccl_id id, int rank,                     \
       struct nccl_config *config))                                                         \
    X(comm_async_error, "ncclCommGetAsyncError", int, (struct ncclComm * comm, int *state)) \
    X(comm_abort, "ncclCommAbort", int, (struct ncclComm * comm))                           \
    X(group_start, "ncclGroupStart", int, (void))                                           \
    X(group_end, "ncclGroupEnd", int, (void))                                               \
    X(send, "ncclSend", int,                                                                \
      (const void *from, size_t count, int dtype, int peer, struct ncclComm *comm,          \
       struct CUstream_st *stream))                                                         \
    X(recv, "ncclRecv", int,                                                                \
      (void *to, size_t count, int dtype, int peer, struct ncclComm *comm,                  \
       struct CUstream_st *stream))                                                         \
    X(error_string, "ncclGetErrorString", const char *, (int result))                       \
    X(last_error, "ncclGetLastError", const char *, (struct ncclComm * comm))

struct nccl {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration */
#define NCCL_MEMBER(member, symbol, result, arguments) result(*member) arguments;
    NCCL_FUNCTIONS(NCCL_MEMBER)
#undef NCCL_MEMBER
};

/* The library. Thread-safe, but slow the first time (hundreds of MB): not for an event loop. The
 * table is the process's. Errors: SHD_ENOTSUP no libnccl.so.2, or one that is too old; with what
 * to do. */
int nccl_load(const struct nccl **ret_nccl, struct shd_err *e);

/* A result as an error: "ncclSend of 4096 bytes: remote process exited or ... (<NCCL's own
 * words>)". NCCL_SUCCESS and NCCL_IN_PROGRESS: SHD_OK, e untouched. A peer's or the network's
 * failure: SHD_EGONE; else SHD_EIO. */
int nccl_result(const struct nccl *nccl, int result, struct shd_err *e, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

#endif
