/* proto/gpu/nccl.h against <nccl.h>, where there is one. Compiling is the test. */
#include <assert.h>
#include <nccl.h>

#include "proto/gpu/nccl.h"

#define SAME_SIZE(a, b) static_assert(sizeof(a) == sizeof(b), #a)
#define SAME_PLACE(a, b) \
    static_assert(offsetof(struct nccl_config, a) == offsetof(ncclConfig_t, b), #a)
#define SAME(a, b) static_assert((int)(a) == (int)(b), #a)

SAME_SIZE(struct nccl_id, ncclUniqueId);
static_assert(NCCL_ID_BYTES == NCCL_UNIQUE_ID_BYTES, "id");
static_assert(sizeof(struct nccl_config) <= sizeof(ncclConfig_t), "config");
SAME_PLACE(size, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
SAME_PLACE(cga_cluster_size, cgaClusterSize);
SAME_PLACE(min_ctas, minCTAs);
SAME_PLACE(max_ctas, maxCTAs);
SAME_PLACE(net_name, netName);
SAME_PLACE(split_share, splitShare);
SAME_PLACE(traffic_class, trafficClass);
SAME(NCCL_UNDEFINED, NCCL_CONFIG_UNDEF_INT);
static_assert(NCCL_CONFIG_VERSION == NCCL_VERSION(2, 18, 0), "version");
SAME(NCCL_SUCCESS, ncclSuccess);
SAME(NCCL_UNHANDLED_CUDA_ERROR, ncclUnhandledCudaError);
SAME(NCCL_SYSTEM_ERROR, ncclSystemError);
SAME(NCCL_INTERNAL_ERROR, ncclInternalError);
SAME(NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
SAME(NCCL_INVALID_USAGE, ncclInvalidUsage);
SAME(NCCL_REMOTE_ERROR, ncclRemoteError);
SAME(NCCL_IN_PROGRESS, ncclInProgress);
SAME(NCCL_UINT8, ncclUint8);
static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int), "enum");

/* Of the same arguments: the assignments warn if not. */
ncclResult_t (*const nccl_header_send)(const void *, size_t, ncclDataType_t, int, struct ncclComm *,
                                       struct CUstream_st *) = ncclSend;
ncclResult_t (*const nccl_header_recv)(void *, size_t, ncclDataType_t, int, struct ncclComm *,
                                       struct CUstream_st *) = ncclRecv;
ncclResult_t (*const nccl_header_init)(struct ncclComm **, int, ncclUniqueId, int,
                                       ncclConfig_t *) = ncclCommInitRankConfig;
ncclResult_t (*const nccl_header_error)(struct ncclComm *, ncclResult_t *) = ncclCommGetAsyncError;
ncclResult_t (*const nccl_header_abort)(struct ncclComm *) = ncclCommAbort;
ncclResult_t (*const nccl_header_id)(ncclUniqueId *) = ncclGetUniqueId;
ncclResult_t (*const nccl_header_start)(void) = ncclGroupStart;
ncclResult_t (*const nccl_header_end)(void) = ncclGroupEnd;
const char *(*const nccl_header_string)(ncclResult_t) = ncclGetErrorString;
const char *(*const nccl_header_last)(struct ncclComm *) = ncclGetLastError;
