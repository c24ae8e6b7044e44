/* See fork.h. */
#include "client/run/fork.h"

#include <pthread.h>
#include <unistd.h>

#include "client/paths/map.h"
#include "client/run/grads.h"
#include "client/run/hostsum.h"
#include "client/session/hub.h"
#include "client/session/session.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int registered = -1;
static struct shd_session *sessions; /* of this process */

static void hold_list(void)
{
    pthread_mutex_lock(&lock);
}

static void let_list_go(void)
{
    pthread_mutex_unlock(&lock);
}

static void drop_fd(int *fd)
{
    const int was = *fd;
    *fd = -1;
    if (was >= 0)
        close(was);
}

static void leave_model(struct shd_model *m)
{
    for (uint32_t i = 0; m->map != NULL && i < m->map->member_count; i++) {
        drop_fd(&m->map->owners[i].board.fd);
        drop_fd(&m->map->owners[i].inbox.fd);
        drop_fd(&m->map->owners[i].whole.held.fd);
    }
    if (m->grads != NULL && m->grads->hostsum != NULL)
        drop_fd(hostsum_fd(m->grads->hostsum));
}

/* In the child: only what is safe in a signal handler, for another thread may have been in a call.
 */
static void leave_sessions(void)
{
    for (struct shd_session *s = sessions; s != NULL; s = s->next) {
        s->left = true;
        for (uint32_t i = 0; s->hub != NULL && i < s->hub->link_count; i++)
            drop_fd(&s->hub->links[i].side_fd);
        for (struct shd_model *m = s->models; m != NULL; m = m->next)
            leave_model(m);
    }
    sessions = NULL;
    pthread_mutex_unlock(&lock);
}

const struct shd_session *fork_sessions(void)
{
    return sessions;
}

static void watch_forks(void)
{
    registered = pthread_atfork(hold_list, let_list_go, leave_sessions);
}

int fork_add(struct shd_session *s, struct shd_err *e)
{
    pthread_once(&once, watch_forks);
    if (registered != 0)
        return err_set(e, SHD_ENOMEM, "no memory to watch for forks");
    s->pid = getpid();
    pthread_mutex_lock(&lock);
    s->next = sessions;
    sessions = s;
    pthread_mutex_unlock(&lock);
    return SHD_OK;
}

void fork_drop(struct shd_session *s)
{
    pthread_mutex_lock(&lock);
    struct shd_session **at = &sessions;
    while (*at != NULL && *at != s)
        at = &(*at)->next;
    if (*at != NULL)
        *at = s->next;
    pthread_mutex_unlock(&lock);
}
