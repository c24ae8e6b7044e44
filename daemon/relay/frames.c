/* See frames.h. */
#include "daemon/relay/frames.h"

#include <inttypes.h>
#include <string.h>

#define DEVICE_CHARS "abcdefghijklmnopqrstuvwxyz0123456789"

int frame_check_device(const char *name, struct shd_err *e)
{
    if (name[0] == '\0' || strlen(name) >= sizeof(((struct frame_open *)NULL)->device) ||
        name[strspn(name, DEVICE_CHARS)] != '\0')
        return err_set(e, SHD_EINVAL, "'%.64s' is no device's name", name);
    return SHD_OK;
}

static int spec_fits(const struct wire_spec_at *at, struct shd_err *e)
{
    if (at->bytes == 0)
        return SHD_OK;
    return err_set(e, SHD_ENOTSUP,
                   "a spec of %" PRIu64 " bytes fits no message, and a relay passes on no other",
                   at->bytes);
}

bool frame_is_of_files(const struct wire_request *request)
{
    return request->type == WIRE_CHECKPOINT || request->type == WIRE_RESTORE;
}

static int files_admitted(const struct wire_request *request, bool files, struct shd_err *e)
{
    if (!files)
        return err_set(e, SHD_EAUTH,
                       "the daemon's host lets no files be written or read for others: its relay "
                       "is to be started with --files, where all hosts have the directory");
    return request->type == WIRE_RESTORE ? spec_fits(&request->restore.spec_at, e) : SHD_OK;
}

int frame_admits(const struct wire_request *request, bool files, struct shd_err *e)
{
    switch (request->type) {
    case WIRE_HELLO:
        if (request->hello.role == WIRE_TRAINER || request->hello.role == WIRE_READER)
            return SHD_OK;
        return err_set(e, SHD_EAUTH, "no session of an admin comes through a relay");
    case WIRE_OPEN_MODEL:
        return spec_fits(&request->open_model.spec_at, e);
    case WIRE_CREATE:
        return spec_fits(&request->create.spec_at, e);
    case WIRE_CHECKPOINT:
    case WIRE_RESTORE:
        return files_admitted(request, files, e);
    case WIRE_RETURN:
        if (request->return_grad.turn == 0)
            return SHD_OK;
        break;
    case WIRE_FORK:
        return err_set(e, SHD_ENOTSUP,
                       "Fork does not pass through a relay: a model with daemons on several hosts, "
                       "as with replicas, has neither forks nor replays");
    case WIRE_PREPARE:
    case WIRE_COMMIT:
    case WIRE_GET_BLOB:
    case WIRE_DIGEST:
    case WIRE_STATUS:
    case WIRE_DETACH:
    case WIRE_LEASE:
    case WIRE_HISTORY:
    case WIRE_PUT:
    case WIRE_GET:
    case WIRE_RESET:
    case WIRE_SHOW:
    case WIRE_SET:
    case WIRE_DROP:
    case WIRE_SNAPSHOT:
    case WIRE_REWIND:
    case WIRE_MOVE:
        return SHD_OK;
    default:
        break;
    }
    return err_set(e, SHD_ENOTSUP, "%s does not pass through a relay",
                   wire_request_name(request->type));
}

void frame_refuse(struct bulk *bulk, const struct shd_err *why)
{
    const struct bulk_head head = { .type = FRAME_REFUSED, .bytes = strlen(why->text) };
    struct shd_err ignored;
    bulk_send(bulk, &head, why->text, &ignored);
}
