/* See bulk_ucx.h. */
#include "daemon/relay/bulk_ucx.h"

#include "proto/share/cluster.h"

#ifdef SHD_HAVE_UCX

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include <openssl/crypto.h>
#include <ucp/api/ucp.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/library.h"
#include "proto/base/sys.h"

#define PIECE_BYTES (UINT64_C(4) << 20) /* of which BULK_STALL_NS has to be enough */
#define TOKEN_BYTES 16u
#define MESSAGE     1u /* the one active message there is */
#define FLUSH_NS    NS_PER_S
#define CANCEL_NS   (2 * NS_PER_S)

/* -- libucp ------------------------------------------------------------------------------------ */

/* X(member, symbol, result, arguments) */
#define UCX_FUNCTIONS(X)                                                                       \
    X(status_string, "ucs_status_string", const char *, (ucs_status_t status))                 \
    X(config_read, "ucp_config_read", ucs_status_t,                                            \
      (const char *prefix, const char *file, ucp_config_t **config))                           \
    X(config_release, "ucp_config_release", void, (ucp_config_t * config))                     \
    X(init, "ucp_init_version", ucs_status_t,                                                  \
      (unsigned major, unsigned minor, const ucp_params_t *params, const ucp_config_t *config, \
       ucp_context_h *context))                                                                \
    X(cleanup, "ucp_cleanup", void, (ucp_context_h context))                                   \
    X(context_query, "ucp_context_query", ucs_status_t,                                        \
      (ucp_context_h context, ucp_context_attr_t * attr))                                      \
    X(mem_map, "ucp_mem_map", ucs_status_t,                                                    \
      (ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *memory))          \
    X(mem_unmap, "ucp_mem_unmap", ucs_status_t, (ucp_context_h context, ucp_mem_h memory))     \
    X(worker_create, "ucp_worker_create", ucs_status_t,                                        \
      (ucp_context_h context, const ucp_worker_params_t *params, ucp_worker_h *worker))        \
    X(worker_destroy, "ucp_worker_destroy", void, (ucp_worker_h worker))                       \
    X(worker_get_address, "ucp_worker_get_address", ucs_status_t,                              \
      (ucp_worker_h worker, ucp_address_t * *address, size_t * bytes))                         \
    X(worker_release_address, "ucp_worker_release_address", void,                              \
      (ucp_worker_h worker, ucp_address_t * address))                                          \
    X(worker_get_efd, "ucp_worker_get_efd", ucs_status_t, (ucp_worker_h worker, int *fd))      \
    X(worker_arm, "ucp_worker_arm", ucs_status_t, (ucp_worker_h worker))                       \
    X(worker_signal, "ucp_worker_signal", ucs_status_t, (ucp_worker_h worker))                 \
    X(worker_progress, "ucp_worker_progress", unsigned, (ucp_worker_h worker))                 \
    X(set_am_recv_handler, "ucp_worker_set_am_recv_handler", ucs_status_t,                     \
      (ucp_worker_h worker, const ucp_am_handler_param_t *param))                              \
    X(ep_create, "ucp_ep_create", ucs_status_t,                                                \
      (ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *ep))                      \
    X(ep_flush_nbx, "ucp_ep_flush_nbx", ucs_status_ptr_t,                                      \
      (ucp_ep_h ep, const ucp_request_param_t *param))                                         \
    X(ep_close_nbx, "ucp_ep_close_nbx", ucs_status_ptr_t,                                      \
      (ucp_ep_h ep, const ucp_request_param_t *param))                                         \
    X(am_send_nbx, "ucp_am_send_nbx", ucs_status_ptr_t,                                        \
      (ucp_ep_h ep, unsigned id, const void *header, size_t header_bytes, const void *buffer,  \
       size_t count, const ucp_request_param_t *param))                                        \
    X(am_recv_data_nbx, "ucp_am_recv_data_nbx", ucs_status_ptr_t,                              \
      (ucp_worker_h worker, void *desc, void *buffer, size_t count,                            \
       const ucp_request_param_t *param))                                                      \
    X(am_data_release, "ucp_am_data_release", void, (ucp_worker_h worker, void *desc))         \
    X(request_check_status, "ucp_request_check_status", ucs_status_t, (void *request))         \
    X(request_free, "ucp_request_free", void, (void *request))

struct ucx_table {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration */
#define UCX_MEMBER(member, symbol, result, arguments) result(*member) arguments;
    UCX_FUNCTIONS(UCX_MEMBER)
#undef UCX_MEMBER
};

static const struct library_function functions[] = {
#define UCX_SYMBOL(member, symbol, result, arguments) \
    { symbol, offsetof(struct ucx_table, member) },
    UCX_FUNCTIONS(UCX_SYMBOL)
#undef UCX_SYMBOL
};

static struct ucx_table ucx;

/* UCX looks once which devices of the network are up, as a context is made. One that comes later is
 * none to it: a relay that began before its network would reach nobody for good. And where one goes
 * no worker can be made any more, not for peers by other devices either. In both cases the next
 * connection has a new context; others keep theirs. */
struct context {
    ucp_context_h ucp; /* owned */
    uint32_t ends;     /* connections */
};

static struct context *newest; /* NULL: the next connection makes it */
static pthread_mutex_t contexts = PTHREAD_MUTEX_INITIALIZER;

static int failed(ucs_status_t status, int code, struct shd_err *e, const char *what)
{
    return err_set(e, code, "UCX, %s: %s", what, ucx.status_string(status));
}

static int make_context(ucp_context_h *ret_context, struct shd_err *e)
{
    const ucp_params_t params = { .field_mask = UCP_PARAM_FIELD_FEATURES |
                                                UCP_PARAM_FIELD_MT_WORKERS_SHARED,
                                  .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
                                  .mt_workers_shared = 1 };
    ucp_context_attr_t attr = { .field_mask = UCP_ATTR_FIELD_THREAD_MODE };
    ucp_config_t *config;
    ucs_status_t status = ucx.config_read(NULL, NULL, &config);
    if (status != UCS_OK)
        return failed(status, SHD_ENOTSUP, e, "read its settings");
    status = ucx.init(UCP_API_MAJOR, UCP_API_MINOR, &params, config, ret_context);
    ucx.config_release(config);
    if (status != UCS_OK)
        return failed(status, SHD_ENOTSUP, e, "start");
    status = ucx.context_query(*ret_context, &attr);
    if (status == UCS_OK && attr.thread_mode == UCS_THREAD_MODE_MULTI)
        return SHD_OK;
    ucx.cleanup(*ret_context);
    return err_set(e, SHD_ENOTSUP,
                   "this UCX was built without threads (--enable-mt), and a relay has some");
}

/* With contexts locked. */
static int renew(struct shd_err *e)
{
    struct context *c = sys_calloc(1, sizeof *c);
    if (c == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a context of UCX");
    const int r = make_context(&c->ucp, e);
    if (r == SHD_OK)
        newest = c;
    else
        free(c);
    return r;
}

static int context_take(struct context **ret_context, struct shd_err *e)
{
    pthread_mutex_lock(&contexts);
    const int r = newest != NULL ? SHD_OK : renew(e);
    if (r == SHD_OK) {
        newest->ends++;
        *ret_context = newest;
    }
    pthread_mutex_unlock(&contexts);
    return r;
}

static void context_put(struct context *c)
{
    pthread_mutex_lock(&contexts);
    if (--c->ends == 0 && c != newest) {
        ucx.cleanup(c->ucp);
        free(c);
    }
    pthread_mutex_unlock(&contexts);
}

/* By who has taken it. */
static void context_is_old(const struct context *c)
{
    pthread_mutex_lock(&contexts);
    if (newest == c)
        newest = NULL;
    pthread_mutex_unlock(&contexts);
}

static int start(struct shd_err *e)
{
    pthread_mutex_lock(&contexts);
    const int r = renew(e);
    pthread_mutex_unlock(&contexts);
    return r;
}

static struct library library = {
    .names = { "libucp.so.0" },
    .absent = "bulk \"ucx\" needs libucp.so.0: install libucx0, or write \"bulk\": \"tcp\" into "
              "the cluster file",
    .called = "libucp.so.0",
    .remedy = "install UCX 1.13 or newer, or write \"bulk\": \"tcp\" into the cluster file",
    .functions = functions,
    .function_count = ARRAY_SIZE(functions),
    .table = &ucx,
    .start = start,
    .lock = PTHREAD_MUTEX_INITIALIZER,
};

/* UCX reads these as it is loaded; what the environment says already stays. Its hooks of mmap()
 * rewrite libc's code, which the service forbids, for a cache that relays can do without; signals
 * and standard output are the relay's, and what fails is said by it. Memory that two processes of
 * one host share is of no use between hosts, and is left in /dev/shm by a relay that is killed. */
static int ucx_load(struct shd_err *e)
{
    setenv("UCX_TLS", "^sm", /* overwrite= */ 0);
    setenv("UCX_MEM_EVENTS", "n", /* overwrite= */ 0);
    setenv("UCX_HANDLE_ERRORS", "none", /* overwrite= */ 0);
    setenv("UCX_LOG_FILE", "stderr", /* overwrite= */ 0);
    setenv("UCX_LOG_LEVEL", "fatal", /* overwrite= */ 0);
    setenv("UCX_WARN_UNUSED_ENV_VARS", "n", /* overwrite= */ 0);
    return library_load(&library, e);
}

/* -- A piece's memory -------------------------------------------------------------------------- */

/* Without its cache UCX maps the memory of each piece by itself, too. 1.16 and 1.18 then look for
 * that memory in the cache, which there is not, where a connection ends in the middle of the piece
 * (openucx/ucx#11467, of May 2026; 1.13 does not); what UCX was given it leaves alone. NULL: it
 * could not be mapped, and UCX goes without, or by copies. */
static ucp_mem_h map_piece(const struct context *c, const uint8_t *data, uint64_t bytes,
                           unsigned prot)
{
    const ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_PROT | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = (void *)(uintptr_t)data, /* which is read, by what `prot` says */
        .length = bytes,
        .prot = prot,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    ucp_mem_h memory;
    return ucx.mem_map(c->ucp, &params, &memory) == UCS_OK ? memory : NULL;
}

static void unmap_piece(const struct context *c, ucp_mem_h *memory)
{
    if (*memory != NULL)
        ucx.mem_unmap(c->ucp, *memory);
    *memory = NULL;
}

static ucp_request_param_t piece_param(ucp_mem_h memory, uint32_t flags)
{
    return (ucp_request_param_t){
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                        (memory != NULL ? UCP_OP_ATTR_FIELD_MEMH : 0u),
        .flags = flags,
        .memory_type = UCS_MEMORY_TYPE_HOST,
        .memh = memory,
    };
}

/* -- An end ------------------------------------------------------------------------------------ */

struct piece_head {
    uint8_t token[TOKEN_BYTES]; /* the receiver's */
    uint64_t number;            /* of the connection's pieces this way, from 0 */
};

struct end {
    struct context *context; /* taken */
    ucp_worker_h worker;     /* owned */
    ucp_ep_h ep;             /* owned; NULL: not joined */
    int fd;                  /* the worker's */
    ucs_status_t ended;      /* UCS_OK: it is not */
    uint8_t token[TOKEN_BYTES];
    struct piece_head head; /* of the piece that is sent, or of the next one */
    void *sending;          /* UCX's request; NULL: none */
    ucp_mem_h sent;         /* owned: the memory of that piece; NULL: UCX looks after it */
    uint64_t send_bytes;
    uint64_t number; /* of the next piece that is offered */
    void *offered;   /* UCX's, of a piece that is there for the asking; NULL: none */
    uint64_t offered_bytes;
    void *receiving;    /* UCX's request; NULL: none */
    ucp_mem_h received; /* as `sent` */
    uint64_t receive_bytes;
    uint64_t refused; /* pieces */
};

static void ended(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    struct end *u = arg;
    (void)ep;
    u->ended = status;
}

/* A stranger may have found the way here: nothing is believed that has not the token. */
static ucs_status_t offer(void *arg, const void *header, size_t header_bytes, void *data,
                          size_t bytes, const ucp_am_recv_param_t *param)
{
    struct end *u = arg;
    struct piece_head head;
    if (header_bytes == sizeof head)
        memcpy(&head, header, sizeof head);
    if (header_bytes != sizeof head || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0 ||
        u->offered != NULL || head.number != u->number ||
        CRYPTO_memcmp(head.token, u->token, TOKEN_BYTES) != 0) {
        u->refused++;
        return UCS_OK; /* dropped; UCX tells its sender that it was taken */
    }
    u->number++;
    u->offered = data;
    u->offered_bytes = bytes;
    return UCS_INPROGRESS;
}

static int take_messages(struct end *u, struct shd_err *e)
{
    const ucp_am_handler_param_t param = { .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
                                                         UCP_AM_HANDLER_PARAM_FIELD_CB |
                                                         UCP_AM_HANDLER_PARAM_FIELD_ARG,
                                           .id = MESSAGE,
                                           .cb = offer,
                                           .arg = u };
    ucs_status_t status = ucx.set_am_recv_handler(u->worker, &param);
    if (status == UCS_OK)
        status = ucx.worker_get_efd(u->worker, &u->fd);
    return status == UCS_OK ? SHD_OK : failed(status, SHD_EIO, e, "take messages");
}

/* The token, and behind it the worker's address. */
static int make_hello(struct end *u, struct bulk_hello *ret_own, struct shd_err *e)
{
    ucp_address_t *address;
    size_t bytes;
    if (getrandom(u->token, TOKEN_BYTES, 0) != TOKEN_BYTES)
        return err_sys(e, SHD_EIO, "getrandom");
    const ucs_status_t status = ucx.worker_get_address(u->worker, &address, &bytes);
    if (status != UCS_OK)
        return failed(status, SHD_EIO, e, "its address");
    int r = SHD_OK;
    if (bytes > BULK_HELLO_BYTES - TOKEN_BYTES) {
        r = err_set(e, SHD_ERANGE,
                    "UCX has an address of %zu bytes, at most %u: name fewer devices in "
                    "UCX_NET_DEVICES",
                    bytes, BULK_HELLO_BYTES - TOKEN_BYTES);
    } else {
        memcpy(ret_own->data, u->token, TOKEN_BYTES);
        memcpy(ret_own->data + TOKEN_BYTES, address, bytes);
        ret_own->bytes = TOKEN_BYTES + bytes;
    }
    ucx.worker_release_address(u->worker, address);
    return r;
}

static bool is_over(void *request)
{
    return request == NULL || ucx.request_check_status(request) != UCS_INPROGRESS;
}

static void finish(struct end *u, void *request, uint64_t time_ns)
{
    const uint64_t deadline_ns = clock_now_ns() + time_ns;
    if (!UCS_PTR_IS_PTR(request))
        return;
    while (!is_over(request) && clock_now_ns() < deadline_ns)
        ucx.worker_progress(u->worker);
    ucx.request_free(request);
}

/* What is under way ends with the endpoint; what UCX should not have ended by its deadline, with
 * the worker. */
static void ucx_close(void *end, bool gently)
{
    struct end *u = end;
    if (u == NULL)
        return;
    const ucp_request_param_t nothing = { .op_attr_mask = 0 };
    const ucp_request_param_t force = { .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                        .flags = UCP_EP_CLOSE_FLAG_FORCE };
    if (u->ep != NULL && gently && u->ended == UCS_OK && u->sending == NULL)
        finish(u, ucx.ep_flush_nbx(u->ep, &nothing), FLUSH_NS);
    if (u->offered != NULL)
        ucx.am_data_release(u->worker, u->offered);
    if (u->ep != NULL)
        finish(u, ucx.ep_close_nbx(u->ep, &force), CANCEL_NS);
    finish(u, u->sending, CANCEL_NS);
    finish(u, u->receiving, CANCEL_NS);
    if (u->worker != NULL)
        ucx.worker_destroy(u->worker);
    if (u->context != NULL) {
        unmap_piece(u->context, &u->sent);
        unmap_piece(u->context, &u->received);
        context_put(u->context);
    }
    free(u);
}

static int make_worker(struct end *u, struct shd_err *e)
{
    const ucp_worker_params_t params = { .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                         .thread_mode = UCS_THREAD_MODE_SINGLE };
    const int r = context_take(&u->context, e);
    if (r != SHD_OK)
        return r;
    const ucs_status_t status = ucx.worker_create(u->context->ucp, &params, &u->worker);
    if (status == UCS_OK)
        return SHD_OK;
    u->worker = NULL;
    context_is_old(u->context);
    context_put(u->context);
    u->context = NULL;
    return failed(status, SHD_EIO, e, "make a worker");
}

static int ucx_open(void **ret_end, struct bulk_hello *ret_own, struct shd_err *e)
{
    struct end *u = sys_calloc(1, sizeof *u);
    if (u == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a connection");
    struct shd_err why = { 0 };
    int r = make_worker(u, &why);
    if (r != SHD_OK) /* by a context that knows what has gone, perhaps */
        r = make_worker(u, e);
    if (r == SHD_OK)
        r = take_messages(u, e);
    if (r == SHD_OK)
        r = make_hello(u, ret_own, e);
    if (r == SHD_OK)
        *ret_end = u;
    else
        ucx_close(u, /* gently= */ false);
    return r;
}

static int ucx_join(void *end, const struct bulk_hello *peer, struct shd_err *e)
{
    struct end *u = end;
    if (peer->bytes <= TOKEN_BYTES)
        return err_set(e, SHD_EPROTO, "its address of UCX has %zu bytes", peer->bytes);
    const ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)(peer->data + TOKEN_BYTES),
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = { .cb = ended, .arg = u },
    };
    memcpy(u->head.token, peer->data, TOKEN_BYTES);
    const ucs_status_t status = ucx.ep_create(u->worker, &params, &u->ep);
    if (status == UCS_OK)
        return SHD_OK;
    u->ep = NULL;
    if (status == UCS_ERR_UNREACHABLE)
        context_is_old(u->context);
    return failed(status, SHD_EIO, e, "connect");
}

static int ucx_turn(void *end)
{
    struct end *u = end;
    if (ucx.worker_progress(u->worker) != 0)
        return SHD_PENDING;
    return ucx.worker_arm(u->worker) == UCS_OK ? SHD_OK : SHD_PENDING;
}

static int ucx_fd(const void *end)
{
    return ((const struct end *)end)->fd;
}

/* -- Pieces ------------------------------------------------------------------------------------ */

static uint64_t piece_of(uint64_t bytes)
{
    return bytes < PIECE_BYTES ? bytes : PIECE_BYTES;
}

/* What a request has come to; freed unless SHD_PENDING, and so is what was mapped for it. */
static int look(struct end *u, void **request, ucp_mem_h *memory, struct shd_err *e,
                const char *what)
{
    ucs_status_t status = UCS_OK;
    if (UCS_PTR_IS_ERR(*request))
        status = UCS_PTR_STATUS(*request);
    else if (*request != NULL)
        status = ucx.request_check_status(*request);
    if (status == UCS_INPROGRESS)
        return SHD_PENDING;
    if (UCS_PTR_IS_PTR(*request))
        ucx.request_free(*request);
    *request = NULL;
    unmap_piece(u->context, memory);
    return status == UCS_OK ? SHD_OK
                            : failed(u->ended != UCS_OK ? u->ended : status, SHD_EGONE, e, what);
}

static int ucx_send(void *end, const uint8_t *data, uint64_t bytes, uint64_t *ret_done,
                    struct shd_err *e)
{
    struct end *u = end;
    if (u->sending == NULL && u->ended != UCS_OK)
        return failed(u->ended, SHD_EGONE, e, "send");
    if (u->sending == NULL) {
        u->send_bytes = piece_of(bytes);
        u->sent = map_piece(u->context, data, u->send_bytes,
                            UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ);
        const ucp_request_param_t param = piece_param(u->sent, UCP_AM_SEND_FLAG_RNDV);
        u->sending = ucx.am_send_nbx(u->ep, MESSAGE, &u->head, sizeof u->head, data, u->send_bytes,
                                     &param);
    } else {
        ucx.worker_progress(u->worker);
    }
    const int r = look(u, &u->sending, &u->sent, e, "send");
    if (r != SHD_OK)
        return r;
    u->head.number++;
    *ret_done = u->send_bytes;
    ucx.worker_signal(u->worker); /* what came meanwhile is looked at, though nobody was to wait */
    return SHD_OK;
}

static int begin_piece(struct end *u, uint8_t *to, uint64_t bytes, struct shd_err *e)
{
    if (u->offered_bytes != piece_of(bytes))
        return err_set(e, SHD_EPROTO,
                       "a piece of %" PRIu64 " bytes by UCX, where %" PRIu64 " are due",
                       u->offered_bytes, piece_of(bytes));
    void *offered = u->offered;
    u->offered = NULL;
    u->receive_bytes = u->offered_bytes;
    u->received = map_piece(u->context, to, u->receive_bytes,
                            UCP_MEM_MAP_PROT_LOCAL_WRITE | UCP_MEM_MAP_PROT_REMOTE_WRITE);
    const ucp_request_param_t param = piece_param(u->received, 0);
    u->receiving = ucx.am_recv_data_nbx(u->worker, offered, to, u->receive_bytes, &param);
    return SHD_OK;
}

static int ucx_receive(void *end, uint8_t *to, uint64_t bytes, uint64_t *ret_done,
                       struct shd_err *e)
{
    struct end *u = end;
    if (u->receiving == NULL && u->offered == NULL && u->ended != UCS_OK)
        return failed(u->ended, SHD_EGONE, e, "receive");
    ucx.worker_progress(u->worker);
    if (u->receiving == NULL) {
        if (u->offered == NULL)
            return SHD_PENDING;
        const int r = begin_piece(u, to, bytes, e);
        if (r != SHD_OK)
            return r;
    }
    const int r = look(u, &u->receiving, &u->received, e, "receive");
    if (r != SHD_OK)
        return r;
    *ret_done = u->receive_bytes;
    return SHD_OK;
}

const struct bulk_path ucx_path = { .name = "ucx",
                                    .said = CLUSTER_UCX_SAID,
                                    .load = ucx_load,
                                    .open = ucx_open,
                                    .join = ucx_join,
                                    .turn = ucx_turn,
                                    .fd = ucx_fd,
                                    .close = ucx_close,
                                    .send = ucx_send,
                                    .receive = ucx_receive };

#else

static int ucx_load(struct shd_err *e)
{
    return err_set(e, SHD_ENOTSUP,
                   "this shardd was built without bulk \"ucx\": build it where libucx-dev is "
                   "installed, or write \"bulk\": \"tcp\" into the cluster file");
}

const struct bulk_path ucx_path = { .name = "ucx", .said = CLUSTER_UCX_SAID, .load = ucx_load };

#endif
