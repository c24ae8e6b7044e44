/* For shardd's LD_PRELOAD: an adoption that takes long. Each time the daemon tells its manager how
 * far it has come it sleeps SLOW_ADOPT_MS afterwards; with SLOW_ADOPT_SILENT=1 the manager is not
 * told. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

__attribute__((visibility("default"))) ssize_t sendmsg(int sock, const struct msghdr *msg,
                                                       int flags)
{
    static const char told[] = "EXTEND_TIMEOUT_USEC=";
    ssize_t (*send)(int, const struct msghdr *, int);
    *(void **)&send = dlsym(RTLD_NEXT, "sendmsg");
    const struct iovec *text = msg->msg_iov;
    if (msg->msg_iovlen != 1 || text->iov_len < sizeof told - 1 ||
        memcmp(text->iov_base, told, sizeof told - 1) != 0)
        return send(sock, msg, flags);
    const char *ms = getenv("SLOW_ADOPT_MS");
    const ssize_t n = getenv("SLOW_ADOPT_SILENT") != NULL ? (ssize_t)text->iov_len
                                                          : send(sock, msg, flags);
    usleep((useconds_t)(ms != NULL ? atoi(ms) : 0) * 1000);
    return n;
}
