/* Messages between libzmq and Arrow's buffers, many in one call and without the GIL.
 *
 * `Inbox.take` receives messages into buffers that Arrow can use as they are: a column of first frames, one of last
 * frames, and lists of those between. With a `Tee` it also sends each message on, as it came. `Outbox.give` sends rows
 * of columns, and `Outbox.digest` hashes them. core.py documents the classes, and python_core.py has the same in Python.
 *
 * The rules:
 *
 * - libzmq is the one that pyzmq has loaded. `load` gets the addresses of its functions, and each call gets a pyzmq
 *   socket, which knows libzmq's pointer. So nothing is linked, and no header of libzmq is needed.
 * - While the GIL is released nothing of Python is touched but memory that this call holds: the inbox, which refuses a
 *   second call, the tee, which belongs to the inbox's thread, and buffers that are exported to the call.
 * - A message is taken or sent whole. One that cannot be taken (no memory, too large) leaves no trace in the buffers, and
 *   is not sent on.
 * - What a tee has taken and could not send yet stays in the tee, also a part of a message: libzmq may abort if a socket
 *   is closed within a message (libzmq#3442).
 * - A signal ends a call with EINTR, and Python's handlers run when it is back in Python: they may close the socket.
 * - No offset that comes from outside is trusted: all rows of an outbox are checked before the first of them is sent.
 * - Limited API of Python 3.11: one binary for it and all later releases. What is static is guarded by the GIL.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DONTWAIT = 1, SNDMORE = 2, EVENTS = 15, XPUB_NODROP = 69, POLLIN = 1 }; /* zmq.h */
enum { MOST_COLUMNS = 8 };

typedef struct {
    _Alignas(void *) unsigned char opaque[64];
} message_t; /* zmq_msg_t of libzmq 4 */

typedef struct {
    void *socket; /* NULL: wait for the descriptor */
    int descriptor;
    short events, revents;
} item_t; /* zmq_pollitem_t */

/* In the order in which `load` is given them. */
static struct {
    int (*msg_init)(message_t *);
    int (*msg_recv)(message_t *, void *, int);
    void *(*msg_data)(message_t *);
    size_t (*msg_size)(const message_t *);
    int (*msg_more)(const message_t *);
    int (*msg_close)(message_t *);
    int (*msg_send)(message_t *, void *, int);
    int (*send)(void *, const void *, size_t, int);
    int (*poll)(item_t *, int, long);
    int (*getsockopt)(void *, int, void *, size_t *);
    int (*setsockopt)(void *, int, const void *, size_t);
    int (*error)(void);
    void *(*stopwatch_start)(void);
    unsigned long (*stopwatch_now)(void *); /* microseconds */
    unsigned long (*stopwatch_stop)(void *);
    uint64_t (*hash)(const void *, size_t, uint64_t); /* XXH3_64bits_withSeed of the package xxhash */
} zmq;

static PyObject *load(PyObject *module, PyObject *addresses)
{
    char *found;
    Py_ssize_t size;
    (void)module;
    if (PyBytes_AsStringAndSize(addresses, &found, &size) < 0)
        return NULL;
    if (size != sizeof zmq)
        return PyErr_Format(PyExc_ValueError, "addresses of %zd bytes are needed", (Py_ssize_t)sizeof zmq);
    memcpy(&zmq, found, sizeof zmq);
    Py_RETURN_NONE;
}

/* What libzmq calls a socket of pyzmq; NULL with an error set if it is closed. */
static void *socket_of(PyObject *given)
{
    PyObject *pointer = PyObject_GetAttrString(given, "underlying");
    if (pointer == NULL)
        return NULL;
    void *sock = PyLong_AsVoidPtr(pointer);
    Py_DECREF(pointer);
    if (sock == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "the socket is closed");
    if (sock != NULL && zmq.msg_init == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "load was not called");
        return NULL;
    }
    return sock;
}

/* libzmq looks at its mailbox only now and then; asking for the events makes it look for room, and for peers. */
static void refresh(void *sock)
{
    int events;
    size_t size = sizeof events;
    zmq.getsockopt(sock, EVENTS, &events, &size);
}

static PyObject *in_use(void)
{
    return PyErr_Format(PyExc_RuntimeError, "another thread is using this inbox");
}

static PyObject *new_object(PyTypeObject *type)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return allocate(type, 0);
}

static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Spare memory for the next batch: filling fresh pages of the system costs twice as much. Touched only while the GIL is
 * held. */
enum { MOST_SPARE = 4, LEAST_SPARE_BYTES = 1 << 16, MOST_SPARE_BYTES = 16 << 20 };
static struct {
    char *memory;
    size_t capacity;
} spare[MOST_SPARE];

static void let_go(char *memory, size_t capacity)
{
    if (capacity >= LEAST_SPARE_BYTES && capacity <= MOST_SPARE_BYTES)
        for (int i = 0; i < MOST_SPARE; i++)
            if (spare[i].memory == NULL) {
                spare[i].memory = memory;
                spare[i].capacity = capacity;
                return;
            }
    free(memory);
}

/* Called when Arrow has no use any more for memory that an inbox has handed over. */
static void release(PyObject *owner)
{
    let_go(PyCapsule_GetPointer(owner, NULL), (size_t)PyCapsule_GetContext(owner));
}

static PyTypeObject *tee_type;

/* A buffer that grows. */

typedef struct {
    char *memory;
    size_t size, capacity; /* bytes */
} Growing;

static int make_room(Growing *buffer, size_t size)
{
    size_t needed = buffer->size + size, doubled = buffer->capacity < 4096 ? 4096 : 2 * buffer->capacity;
    size_t capacity = needed > doubled ? needed : doubled;
    char *memory = realloc(buffer->memory, capacity);
    if (memory == NULL)
        return -1;
    buffer->memory = memory;
    buffer->capacity = capacity;
    return 0;
}

static inline int append(Growing *buffer, const void *content, size_t size)
{
    if (size > buffer->capacity - buffer->size && make_room(buffer, size) < 0)
        return -1;
    if (size)
        memcpy(buffer->memory + buffer->size, content, size);
    buffer->size += size;
    return 0;
}

static inline int append_offset(Growing *buffer, size_t offset)
{
    int32_t value = (int32_t)offset;
    return offset > INT32_MAX ? -1 : append(buffer, &value, sizeof value);
}

/* Give back what a small batch does not need of a large buffer. False if there is no memory. */
static int fit(Growing *buffer)
{
    if (buffer->memory == NULL)
        return make_room(buffer, 0) == 0;
    if (buffer->size < buffer->capacity / 4) {
        char *memory = realloc(buffer->memory, buffer->size + 1);
        if (memory != NULL)
            *buffer = (Growing){memory, buffer->size, buffer->size + 1};
    }
    return 1;
}

/* Tee: sends the messages that an inbox takes on to an XPUB. */

enum { FEW_FRAMES = 16, MANY_FRAMES = 1024, DROPPING_MICROSECONDS = 100000 };

typedef struct {
    PyObject_HEAD
    PyObject *given;     /* pyzmq's socket; its SNDTIMEO says how long one try waits for room */
    void *sock;          /* what libzmq calls it, in a call */
    void *watch;         /* microseconds since the tee was made */
    message_t *frames;   /* of the message that is taken or sent now; all are initialized */
    size_t capacity, count, sent;
    int drops;           /* whether a message is dropped for subscribers that have no room */
    int is_full;         /* whether the message has found a full queue */
    unsigned long waits_from; /* when a full queue is worth a wait again, because the last wait was in vain */
    long long published, full, waited;
} Tee;

static int is_pending(const Tee *tee)
{
    return tee->sent < tee->count;
}

static void set_nodrop(Tee *tee, int nodrop)
{
    zmq.setsockopt(tee->sock, XPUB_NODROP, &nodrop, sizeof nodrop);
}

/* The place of a frame; NULL if there is no memory. libzmq moves messages by copying them, and so does this. */
static message_t *place_of(Tee *tee, size_t index)
{
    if (index >= tee->capacity) {
        size_t capacity = tee->capacity ? 2 * tee->capacity : FEW_FRAMES;
        message_t *frames = realloc(tee->frames, capacity * sizeof *frames);
        if (frames == NULL)
            return NULL;
        tee->frames = frames;
        while (tee->capacity < capacity)
            zmq.msg_init(&frames[tee->capacity++]);
    }
    return &tee->frames[index];
}

/* Forget the message, and the content of frames that were not sent. */
static void forget_frames(Tee *tee, size_t frames)
{
    for (size_t i = 0; i < frames && i < tee->capacity; i++) {
        zmq.msg_close(&tee->frames[i]);
        zmq.msg_init(&tee->frames[i]);
    }
    tee->count = tee->sent = 0;
    tee->is_full = 0;
    if (tee->capacity > MANY_FRAMES) {
        free(tee->frames);
        tee->frames = NULL;
        tee->capacity = 0;
    }
}

static int try_frame(Tee *tee, int flags)
{
    return zmq.msg_send(&tee->frames[tee->sent], tee->sock, flags) < 0 ? zmq.error() : 0;
}

/* Send a frame for which a subscriber seems to have no room; EAGAIN if it has none, and messages are not dropped. With
 * XPUB_NODROP off for this frame alone, libzmq drops it for the subscribers that are full, and refuses no later one
 * because of them until they have read. */
static int insist(Tee *tee, int more)
{
    refresh(tee->sock);
    int error = try_frame(tee, more | DONTWAIT);
    if (error != EAGAIN)
        return error;
    tee->full += !tee->is_full;
    tee->is_full = 1;
    unsigned long began = zmq.stopwatch_now(tee->watch);
    if (!tee->drops || began >= tee->waits_from) {
        error = try_frame(tee, more);
        unsigned long now = zmq.stopwatch_now(tee->watch);
        tee->waited += (long long)(now - began);
        tee->waits_from = now + DROPPING_MICROSECONDS;
    }
    if (error == EAGAIN && tee->drops) {
        set_nodrop(tee, 0);
        error = try_frame(tee, more | DONTWAIT);
        set_nodrop(tee, 1);
    }
    return error;
}

/* Send what is left of the message. 0 if all of it is out; EAGAIN if a subscriber has no room yet. */
static int send_on(Tee *tee)
{
    while (is_pending(tee)) {
        int more = tee->sent + 1 < tee->count ? SNDMORE : 0;
        int error = try_frame(tee, more | DONTWAIT);
        if (error == EAGAIN)
            error = insist(tee, more);
        if (error)
            return error;
        tee->sent++;
    }
    tee->published++;
    forget_frames(tee, 0); /* libzmq has emptied them */
    return 0;
}

static PyObject *tee_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *given;
    int drops;
    (void)names;
    if (!PyArg_ParseTuple(args, "Op:Tee", &given, &drops) || socket_of(given) == NULL)
        return NULL;
    Tee *tee = (Tee *)new_object(type); /* zeroed */
    if (tee == NULL)
        return NULL;
    tee->drops = drops;
    tee->watch = zmq.stopwatch_start();
    Py_INCREF(given);
    tee->given = given;
    return (PyObject *)tee;
}

static void tee_dealloc(PyObject *self)
{
    Tee *tee = (Tee *)self;
    for (size_t i = 0; i < tee->capacity; i++)
        zmq.msg_close(&tee->frames[i]);
    free(tee->frames);
    zmq.stopwatch_stop(tee->watch);
    Py_DECREF(tee->given);
    free_object(self);
}

static PyMemberDef tee_members[] = {
    {"frames", T_PYSSIZET, offsetof(Tee, count), READONLY, "How many frames the message has that it sends now."},
    {"sent", T_PYSSIZET, offsetof(Tee, sent), READONLY, "How many of them it has sent."},
    {"published", T_LONGLONG, offsetof(Tee, published), READONLY, "How many messages it has sent."},
    {"full", T_LONGLONG, offsetof(Tee, full), READONLY, "How many messages have found a full queue."},
    {"waited", T_LONGLONG, offsetof(Tee, waited), READONLY, "How many microseconds it has waited for room."},
    {0},
};
static PyType_Slot tee_slots[] = {
    {Py_tp_doc, "Sends messages on."},
    {Py_tp_new, tee_new},
    {Py_tp_dealloc, tee_dealloc},
    {Py_tp_members, tee_members},
    {0, NULL},
};
static PyType_Spec tee_spec = {
    "zmq_datasource.transport._core.Tee", sizeof(Tee), 0, Py_TPFLAGS_DEFAULT, tee_slots,
};

/* Inbox: messages that were taken and not handed over. */

typedef struct {
    Growing data, ends; /* of a column of frames; offsets begin with a 0 */
} Frames;

enum { FIRST, MIDDLE, LAST, COLUMNS };

/* A message's only frame is its last. */
typedef struct {
    PyObject_HEAD
    union {
        struct {
            Frames frames[COLUMNS];
            Growing lists;   /* where the middle frames of each message end */
            Growing several; /* a bit for each message: whether it has a first frame */
        };
        Growing filled[2 * COLUMNS + 2];
    };
    size_t before[COLUMNS]; /* bytes of frames in the batch before: only a large column gets spare memory */
    Py_ssize_t messages, size;
    size_t turn; /* which socket is next */
    int busy;
} Inbox;

enum { FILLED = 2 * COLUMNS + 2 };

static int begin(Inbox *inbox)
{
    if (inbox->lists.size)
        return 0;
    for (int i = 0; i < COLUMNS; i++) {
        Frames *column = &inbox->frames[i];
        for (int j = 0; j < MOST_SPARE && column->data.memory == NULL && inbox->before[i] >= LEAST_SPARE_BYTES; j++)
            if (spare[j].memory != NULL) {
                column->data.memory = spare[j].memory;
                column->data.capacity = spare[j].capacity;
                spare[j].memory = NULL;
            }
        column->ends.size = 0;
        if (append_offset(&column->ends, 0) < 0)
            return -1;
    }
    return append_offset(&inbox->lists, 0);
}

/* libzmq delivers a message whole, so only its first frame may be missing. */
static int next_frame(message_t *frame, void *sock, int first)
{
    int error;
    do
        error = zmq.msg_recv(frame, sock, DONTWAIT) < 0 ? zmq.error() : 0;
    while (error == EINTR && !first);
    return error;
}

static int keep(Frames *column, message_t *frame)
{
    if (frame != NULL && append(&column->data, zmq.msg_data(frame), zmq.msg_size(frame)) < 0)
        return -1;
    return append_offset(&column->ends, column->data.size);
}

/* Note which of its frames a message has, and count it. */
static int end_message(Inbox *inbox, int frames)
{
    char none = 0;
    if (frames == 1 && keep(&inbox->frames[FIRST], NULL) < 0)
        return -1;
    if (append_offset(&inbox->lists, inbox->frames[MIDDLE].ends.size / sizeof(int32_t) - 1) < 0)
        return -1;
    if (inbox->messages % 8 == 0 && append(&inbox->several, &none, 1) < 0)
        return -1;
    if (frames > 1)
        inbox->several.memory[inbox->messages / 8] |= (char)(1 << inbox->messages % 8);
    inbox->messages++;
    return 0;
}

/* Number `index` of a buffer of 32-bit numbers. */
static size_t offset_in(const Growing *buffer, size_t index)
{
    int32_t value;
    memcpy(&value, buffer->memory + index * sizeof value, sizeof value);
    return (size_t)value;
}

static void cut_column(Frames *column, size_t frames)
{
    column->ends.size = (frames + 1) * sizeof(int32_t);
    column->data.size = offset_in(&column->ends, frames);
}

/* Remove the frames of an unfinished message. The number of messages says where each buffer must end, so that no sizes
 * are noted before each message, which would cost more than all else here. */
static void remove_unfinished(Inbox *inbox)
{
    size_t messages = (size_t)inbox->messages;
    cut_column(&inbox->frames[FIRST], messages);
    cut_column(&inbox->frames[LAST], messages);
    cut_column(&inbox->frames[MIDDLE], offset_in(&inbox->lists, messages));
    inbox->lists.size = (messages + 1) * sizeof(int32_t);
    inbox->several.size = (messages + 7) / 8;
}

/* Take one message; the result is an error. If it is too large (`excess` becomes its size) or there is no memory, receive
 * it to its end, and leave the buffers unchanged. A tee gets its frames, to be sent on; without one, each frame goes into
 * `spare`, which must be initialized. */
static int take_one(Inbox *inbox, void *sock, Tee *tee, message_t *spare, size_t largest, size_t *excess)
{
    size_t size = 0, frames = 0;
    int kept = 0, error = 0, more = 1;
    while (more) {
        message_t *frame = tee == NULL ? spare : place_of(tee, frames);
        if (frame == NULL && frames == 0)
            return ENOMEM;
        if (frame == NULL) {
            kept = -1;
            frame = spare;
        }
        error = next_frame(frame, sock, frames == 0);
        if (error)
            break;
        more = zmq.msg_more(frame);
        size += zmq.msg_size(frame);
        if (kept == 0 && size <= largest)
            kept = keep(&inbox->frames[!more ? LAST : frames ? MIDDLE : FIRST], frame);
        frames++;
    }
    if (!error && kept == 0 && size <= largest)
        kept = end_message(inbox, frames > 1 ? 2 : 1);
    int is_taken = !error && kept == 0 && size <= largest;
    if (is_taken)
        inbox->size += (Py_ssize_t)size;
    else
        remove_unfinished(inbox);
    if (tee != NULL && is_taken)
        tee->count = frames;
    else if (tee != NULL)
        forget_frames(tee, frames);
    if (size > largest)
        *excess = size;
    return error || kept == 0 ? error : ENOMEM;
}

/* Messages that were taken from one socket within a millisecond. */
typedef struct {
    long long began, at; /* microseconds since the call began: of its first and of its last message */
    Py_ssize_t messages;
    size_t source;
} Run;
enum { RUN_MICROSECONDS = 1000 };

/* Room for one more run is there. */
static void note_run(Growing *runs, long long now, Py_ssize_t messages, size_t source)
{
    Run *last = runs->size ? (Run *)(runs->memory + runs->size) - 1 : NULL;
    if (last != NULL && last->source == source && now - last->began < RUN_MICROSECONDS) {
        last->at = now;
        last->messages += messages;
    } else if (messages) {
        Run run = {now, now, messages, source};
        memcpy(runs->memory + runs->size, &run, sizeof run);
        runs->size += sizeof run;
    }
}

/* One call of `take`. */
typedef struct {
    Inbox *inbox;
    Tee *tee;          /* or NULL */
    item_t *items;     /* the sockets, and behind them the alarms */
    char *empty;       /* of each socket: whether it had no more messages when it was tried last */
    size_t sockets, alarms;
    Py_ssize_t most, room, largest;
    long long wait, gather; /* microseconds */
    void *watch;
    Growing runs;
    Py_ssize_t taken, start; /* messages; the inbox's bytes at the start */
    size_t excess, excess_of;
    int error;
} Call;

enum { BURST = 256 };

static int has_room(const Call *call)
{
    /* Behind that a message may not fit. */
    Py_ssize_t last = INT32_MAX - call->largest;
    return call->taken < call->most && call->inbox->size - call->start < call->room && call->inbox->size <= last;
}

/* Take messages from one socket, and send them on. False if the call must end, or must wait for a subscriber. */
static int take_burst(Call *call, size_t source, message_t *spare)
{
    Py_ssize_t taken = 0;
    int error = 0;
    if (sizeof(Run) > call->runs.capacity - call->runs.size && make_room(&call->runs, sizeof(Run)) < 0) {
        call->error = ENOMEM;
        return 0;
    }
    call->empty[source] = 0;
    while (!error && !call->excess && taken < BURST && has_room(call)) {
        error = take_one(call->inbox, call->items[source].socket, call->tee, spare, (size_t)call->largest, &call->excess);
        call->excess_of = source;
        if (error || call->excess)
            break;
        taken++;
        call->taken++;
        if (call->tee != NULL)
            call->error = error = send_on(call->tee);
    }
    if (taken)
        note_run(&call->runs, (long long)zmq.stopwatch_now(call->watch), taken, source);
    if (call->error)
        return 0;
    call->empty[source] = error == EAGAIN;
    call->error = error == EAGAIN ? 0 : error;
    return !call->error && !call->excess;
}

/* Wait for a message, or with a message that has no room only look for alarms. False if the call must end. */
static int wait_for_more(Call *call, int has_message, long long left)
{
    size_t first = has_message ? call->sockets : 0, count = call->sockets + call->alarms;
    long milliseconds = has_message ? 0 : (long)((left + 999) / 1000);
    if (zmq.poll(call->items + first, (int)(count - first), milliseconds) < 0) {
        call->error = zmq.error();
        return 0;
    }
    for (size_t i = call->sockets; i < count; i++)
        if (call->items[i].revents)
            return 0;
    return 1;
}

static void take_all(Call *call, message_t *spare)
{
    for (;;) {
        int goes_on = 1, more = 0;
        call->error = call->tee != NULL && is_pending(call->tee) ? send_on(call->tee) : 0;
        for (size_t i = 0; i < call->sockets && goes_on && !call->error && has_room(call); i++) {
            size_t source = call->inbox->turn++ % call->sockets;
            goes_on = take_burst(call, source, spare);
            more |= !call->empty[source];
        }
        int is_blocked = call->error == EAGAIN; /* a subscriber has no room */
        if (is_blocked)
            call->error = 0;
        long long now = (long long)zmq.stopwatch_now(call->watch);
        long long left = (call->taken || call->gather > call->wait ? call->gather : call->wait) - now;
        if (call->error || call->excess || !has_room(call))
            return;
        if (more && !is_blocked)
            continue;
        if (left <= 0 || !wait_for_more(call, is_blocked, left))
            return;
    }
}

static PyObject *result_of(const Call *call)
{
    const Run *runs = (const Run *)call->runs.memory;
    size_t count = call->runs.size / sizeof *runs;
    PyObject *listed = PyList_New((Py_ssize_t)count), *result;
    for (size_t i = 0; listed != NULL && i < count; i++) {
        PyObject *run = Py_BuildValue("Lnn", runs[i].at, runs[i].messages, (Py_ssize_t)runs[i].source);
        if (run == NULL || PyList_SetItem(listed, (Py_ssize_t)i, run) < 0)
            Py_CLEAR(listed);
    }
    if (listed == NULL)
        return NULL;
    result = Py_BuildValue("Oy#nni", listed, call->empty, (Py_ssize_t)call->sockets, (Py_ssize_t)call->excess,
                           (Py_ssize_t)call->excess_of, call->error);
    Py_DECREF(listed);
    return result;
}

/* Describe what to wait for: sockets and descriptors. False with an error set. */
static int describe(PyObject *given, item_t *items, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        PyObject *one = PyTuple_GetItem(given, (Py_ssize_t)i);
        items[i].events = POLLIN;
        if (PyLong_Check(one))
            items[i].descriptor = PyLong_AsLong(one);
        else
            items[i].socket = socket_of(one);
        if (PyErr_Occurred())
            return 0;
    }
    return 1;
}

/* Take for a call whose arguments are read. `given` has the sockets and the alarms. */
static PyObject *take_for(Call *call, PyObject *given)
{
    message_t spare;
    if (!describe(given, call->items, call->sockets + call->alarms))
        return NULL;
    if (call->inbox->busy)
        return in_use();
    if (begin(call->inbox) < 0)
        return PyErr_NoMemory();
    if (call->tee != NULL && (call->tee->sock = socket_of(call->tee->given)) == NULL)
        return NULL;
    call->start = call->inbox->size;
    call->inbox->busy = 1;
    Py_BEGIN_ALLOW_THREADS
    call->watch = zmq.stopwatch_start();
    zmq.msg_init(&spare);
    take_all(call, &spare);
    zmq.msg_close(&spare);
    zmq.stopwatch_stop(call->watch);
    Py_END_ALLOW_THREADS
    call->inbox->busy = 0;
    return result_of(call);
}

static PyObject *inbox_take(PyObject *self, PyObject *args)
{
    Call call = {.inbox = (Inbox *)self};
    PyObject *given, *tee, *result;
    Py_ssize_t sockets;
    if (!PyArg_ParseTuple(args, "O!nnnnLLO:take", &PyTuple_Type, &given, &sockets, &call.most, &call.room, &call.largest,
                          &call.wait, &call.gather, &tee))
        return NULL;
    if (call.largest < 0 || call.largest > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "largest is %zd: what offsets of 32 bits reach is possible", call.largest);
    if (sockets < 0 || sockets > PyTuple_Size(given))
        return PyErr_Format(PyExc_ValueError, "%zd sockets of %zd", sockets, PyTuple_Size(given));
    if (tee != Py_None && Py_TYPE(tee) != tee_type)
        return PyErr_Format(PyExc_TypeError, "a tee of this core is needed");
    call.tee = tee == Py_None ? NULL : (Tee *)tee;
    call.sockets = (size_t)sockets;
    call.alarms = (size_t)(PyTuple_Size(given) - sockets);
    call.items = calloc(call.sockets + call.alarms + 1, sizeof *call.items);
    call.empty = calloc(call.sockets + 1, 1);
    result = call.items == NULL || call.empty == NULL ? PyErr_NoMemory() : take_for(&call, given);
    free(call.items);
    free(call.empty);
    free(call.runs.memory);
    return result;
}

static PyObject *inbox_hand_over(PyObject *self, PyObject *nothing)
{
    Inbox *inbox = (Inbox *)self;
    PyObject *owners[FILLED], *result;
    (void)nothing;
    if (inbox->busy)
        return in_use();
    inbox->busy = 1; /* what makes objects may run other code */
    result = begin(inbox) < 0 ? PyErr_NoMemory() : PyTuple_New(FILLED);
    for (int i = 0; result != NULL && i < FILLED; i++) {
        Growing *filled = &inbox->filled[i];
        PyObject *part = NULL;
        owners[i] = fit(filled) ? PyCapsule_New(filled->memory, NULL, NULL) : PyErr_NoMemory();
        if (owners[i] != NULL)
            part = Py_BuildValue("KnN", (unsigned long long)(uintptr_t)filled->memory, (Py_ssize_t)filled->size, owners[i]);
        if (part == NULL || PyTuple_SetItem(result, i, part) < 0)
            Py_CLEAR(result);
    }
    inbox->busy = 0;
    if (result == NULL)
        return NULL;
    for (int i = 0; i < COLUMNS; i++)
        inbox->before[i] = inbox->frames[i].data.size;
    for (int i = 0; i < FILLED; i++) { /* from here on nothing can fail */
        PyCapsule_SetContext(owners[i], (void *)inbox->filled[i].capacity);
        PyCapsule_SetDestructor(owners[i], release);
        inbox->filled[i] = (Growing){0};
    }
    inbox->messages = inbox->size = 0;
    return result;
}

static void inbox_dealloc(PyObject *self)
{
    for (int i = 0; i < FILLED; i++)
        free(((Inbox *)self)->filled[i].memory);
    free_object(self);
}

static PyMethodDef inbox_methods[] = {
    {"take", inbox_take, METH_VARARGS,
     "take(sockets and alarms, sockets, most, room, largest, wait, gather, tee) -> (runs, empty, excess, excess of, errno)"},
    {"hand_over", inbox_hand_over, METH_NOARGS,
     "hand_over() -> address, size and owner of: data and ends of first, middle and last frames, ends of lists, bits"},
    {0},
};
static PyMemberDef inbox_members[] = {
    {"messages", T_PYSSIZET, offsetof(Inbox, messages), READONLY, "How many messages it holds."},
    {"size", T_PYSSIZET, offsetof(Inbox, size), READONLY, "The bytes of their frames."},
    {0},
};
static PyType_Slot inbox_slots[] = {
    {Py_tp_doc, "Messages that were taken and not handed over."},
    {Py_tp_dealloc, inbox_dealloc},
    {Py_tp_methods, inbox_methods},
    {Py_tp_members, inbox_members},
    {0, NULL},
};
static PyType_Spec inbox_spec = {
    "zmq_datasource.transport._core.Inbox", sizeof(Inbox), 0, Py_TPFLAGS_DEFAULT, inbox_slots,
};

/* Outbox: rows of columns that are to be messages. */

enum Kind { FRAME, SAME, NUMBER, FRAMES };

typedef struct {
    enum Kind kind;
    int empty;          /* whether a null is an empty frame; else it is none */
    int64_t first;      /* where the column begins in its buffers; of NUMBER the number of row 0 */
    int64_t inner;      /* FRAMES: where the frames begin in theirs */
    union {
        struct {
            Py_buffer data, offsets, valid, lists;
        };
        Py_buffer held[4];
    };
} Column;

typedef struct {
    const char *content;
    size_t size;
} Frame;

/* Number i of a buffer of offsets; -1 if there is none. They may be unaligned. */
static int64_t offset_at(const Py_buffer *offsets, int64_t i)
{
    int32_t value;
    if (i < 0 || i >= offsets->len / (int64_t)sizeof value)
        return -1;
    memcpy(&value, (const char *)offsets->buf + i * (int64_t)sizeof value, sizeof value);
    return value;
}

/* Where element i begins and ends; false if there are no such offsets, or they do not lie in order within `size`. */
static int range_at(const Py_buffer *offsets, int64_t i, int64_t size, int64_t *begin, int64_t *end)
{
    *begin = offset_at(offsets, i);
    *end = *begin < 0 ? -1 : offset_at(offsets, i + 1);
    return *begin >= 0 && *begin <= *end && *end <= size;
}

/* Whether element i is there: 1 or 0, or -1 if the bits do not reach to it. */
static int is_valid(const Column *column, int64_t i)
{
    if (column->valid.buf == NULL)
        return 1;
    if (i < 0 || i / 8 >= column->valid.len)
        return -1;
    return ((const uint8_t *)column->valid.buf)[i / 8] >> (i % 8) & 1;
}

static const Frame nothing = {"", 0};

/* Sends the frames of a message, each when the next one is known: libzmq must be told whether another follows. */
typedef struct {
    void *sock;    /* NULL: only count */
    int64_t *left; /* how many microseconds the first frame may still wait for room */
    int64_t count;
    size_t size; /* of all frames */
    int hashes;      /* whether a digest is wanted: the hash of each frame, with that of the frame before as its seed */
    uint64_t digest;
    int error, lost;
    Frame last;
    char number[8]; /* what the last frame is, if it is a number */
} Message;

static int send_frame(void *sock, Frame frame, int flags)
{
    return zmq.send(sock, frame.content, frame.size, flags) < 0 ? zmq.error() : 0;
}

/* Send the frame `last`. Once libzmq has taken the first frame, it refuses another only if the message's connection is
 * lost. It has then dropped the message, and discards its other frames, which must be sent all the same. */
static void pass(Message *message, int more)
{
    void *sock = message->sock;
    int first = message->count == 1, flags = more | DONTWAIT;
    if (sock == NULL || message->error)
        return;
    int error = send_frame(sock, message->last, flags);
    if (first && error == EAGAIN && *message->left > 0) { /* up to SNDTIMEO */
        void *watch = zmq.stopwatch_start();
        error = send_frame(sock, message->last, more);
        *message->left -= (int64_t)zmq.stopwatch_stop(watch);
    } else if (first && error == EAGAIN) {
        refresh(sock);
        error = send_frame(sock, message->last, flags);
    }
    while (!first && error == EINTR)
        error = send_frame(sock, message->last, flags);
    message->lost |= !first && error == EAGAIN;
    message->error = message->lost ? 0 : error;
}

static void add_frame(Message *message, Frame frame)
{
    if (message->count)
        pass(message, SNDMORE);
    message->count++;
    message->size += frame.size;
    if (message->hashes)
        message->digest = zmq.hash(frame.content, frame.size, message->digest);
    message->last = frame;
}

static void add_number(Message *message, uint64_t number)
{
    char bytes[8];
    for (int i = 7; i >= 0; i--, number >>= 8)
        bytes[i] = (char)(number & 0xff);
    add_frame(message, (Frame){bytes, 8}); /* sends the frame before, which may be in `number` */
    memcpy(message->number, bytes, 8);
    message->last.content = message->number;
}

/* Add element i as a frame; false if it is outside of the column. */
static int add_element(Message *message, const Column *column, int64_t i)
{
    int64_t begin, end;
    if (!range_at(&column->offsets, i, column->data.len, &begin, &end))
        return 0;
    add_frame(message, begin == end ? nothing : (Frame){(const char *)column->data.buf + begin, (size_t)(end - begin)});
    return 1;
}

static int add_list(Message *message, const Column *column, int64_t i)
{
    int64_t begin, end;
    if (!range_at(&column->lists, i, INT32_MAX, &begin, &end))
        return 0;
    for (int64_t at = begin; at < end; at++)
        if (!add_element(message, column, column->inner + at))
            return 0;
    return 1;
}

/* Add what a column has of a row; false if the column does not reach there. */
static int add_row(Message *message, const Column *column, int64_t row)
{
    int64_t i = column->first + row;
    int valid = is_valid(column, i);
    switch (column->kind) {
    case SAME:
        add_frame(message, (Frame){column->data.buf, (size_t)column->data.len});
        return 1;
    case NUMBER:
        add_number(message, (uint64_t)i);
        return 1;
    case FRAME:
        if (valid == 0 && column->empty)
            add_frame(message, nothing);
        return valid == 1 ? add_element(message, column, i) : valid == 0;
    case FRAMES:
        return valid == 1 && add_list(message, column, i);
    }
    return 0;
}

/* The first row that reaches beyond its columns, or has no frame; `rows` if there is none. */
static Py_ssize_t check(const Column *columns, int count, Py_ssize_t rows)
{
    for (Py_ssize_t row = 0; row < rows; row++) {
        Message message = {0};
        for (int i = 0; i < count; i++)
            if (!add_row(&message, &columns[i], row))
                return row;
        if (!message.count)
            return row;
    }
    return rows;
}

/* 0 if a row is sent; EINTR if it is not, and is to be tried again at once. */
static int give_one(void *sock, const Column *columns, int count, Py_ssize_t row, int64_t *left)
{
    Message message = {.sock = sock, .left = left};
    for (int i = 0; i < count; i++)
        add_row(&message, &columns[i], row);
    pass(&message, 0);
    return message.lost ? EINTR : message.error;
}

static int as_column(PyObject *described, Column *column, Py_ssize_t rows)
{
    PyObject *given[4];
    int kind;
    long long first, inner;
    if (!PyArg_ParseTuple(described, "iOOOOpLL", &kind, &given[0], &given[1], &given[2], &given[3], &column->empty,
                          &first, &inner))
        return -1;
    if (first < 0 || first > INT64_MAX - rows || inner < 0 || inner > INT64_MAX - INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a column begins below 0, or its numbers do not fit 63 bits");
        return -1;
    }
    column->kind = (enum Kind)kind;
    column->first = first;
    column->inner = inner;
    for (int i = 0; i < 4; i++)
        if (given[i] != Py_None && PyObject_GetBuffer(given[i], &column->held[i], PyBUF_SIMPLE) < 0)
            return -1;
    return 0;
}

typedef struct {
    PyObject_HEAD
    int count;
    Py_ssize_t rows;
    long long waited;
    Column columns[MOST_COLUMNS];
} Outbox;

static void outbox_dealloc(PyObject *self)
{
    Outbox *outbox = (Outbox *)self;
    for (int i = 0; i < outbox->count; i++)
        for (int j = 0; j < 4; j++)
            PyBuffer_Release(&outbox->columns[i].held[j]);
    free_object(self);
}

static PyObject *outbox_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *described;
    Py_ssize_t rows, row;
    (void)names;
    if (!PyArg_ParseTuple(args, "O!n:Outbox", &PyTuple_Type, &described, &rows))
        return NULL;
    Py_ssize_t count = PyTuple_Size(described);
    if (count < 1 || count > MOST_COLUMNS || rows < 0)
        return PyErr_Format(PyExc_ValueError, "%zd rows of %zd columns: 1 to %d are possible", rows, count, (int)MOST_COLUMNS);
    Outbox *outbox = (Outbox *)new_object(type); /* zeroed, and so are its buffers: releasing them does nothing */
    if (outbox == NULL)
        return NULL;
    outbox->rows = rows;
    while (outbox->count < count) {
        int i = outbox->count++; /* counted first, so that an error releases its buffers */
        if (as_column(PyTuple_GetItem(described, i), &outbox->columns[i], rows) < 0) {
            Py_DECREF((PyObject *)outbox);
            return NULL;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    row = check(outbox->columns, outbox->count, rows);
    Py_END_ALLOW_THREADS
    if (row < rows) {
        Py_DECREF((PyObject *)outbox);
        return PyErr_Format(PyExc_ValueError, "row %zd has no frame, or is not within its column", row);
    }
    return (PyObject *)outbox;
}

static int within(const Outbox *outbox, Py_ssize_t start, Py_ssize_t end)
{
    if (start >= 0 && start <= end && end <= outbox->rows)
        return 1;
    PyErr_Format(PyExc_ValueError, "rows %zd to %zd of %zd", start, end, outbox->rows);
    return 0;
}

static PyObject *outbox_size(PyObject *self, PyObject *args)
{
    Outbox *outbox = (Outbox *)self;
    Py_ssize_t start, end;
    Message message = {0};
    if (!PyArg_ParseTuple(args, "nn:size", &start, &end) || !within(outbox, start, end))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = start; row < end; row++)
        for (int i = 0; i < outbox->count; i++)
            add_row(&message, &outbox->columns[i], row);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(message.size);
}

static PyObject *outbox_digest(PyObject *self, PyObject *nothing)
{
    Outbox *outbox = (Outbox *)self;
    uint64_t digest = 0;
    (void)nothing;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = 0; row < outbox->rows; row++) {
        Message message = {.hashes = 1};
        for (int i = 0; i < outbox->count; i++)
            add_row(&message, &outbox->columns[i], row);
        digest += message.digest;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(digest);
}

static PyObject *outbox_give(PyObject *self, PyObject *args)
{
    Outbox *outbox = (Outbox *)self;
    PyObject *given;
    Py_ssize_t start, end, row;
    long long wait;
    int64_t left;
    int error = 0;
    if (!PyArg_ParseTuple(args, "OnnL:give", &given, &start, &end, &wait) || !within(outbox, start, end))
        return NULL;
    void *sock = socket_of(given);
    if (sock == NULL)
        return NULL;
    left = wait;
    Py_BEGIN_ALLOW_THREADS
    for (row = start; row < end; row++) {
        error = give_one(sock, outbox->columns, outbox->count, row, &left);
        if (error)
            break;
    }
    Py_END_ALLOW_THREADS
    outbox->waited += wait - left;
    return Py_BuildValue("ni", row, error);
}

static PyMethodDef outbox_methods[] = {
    {"give", outbox_give, METH_VARARGS, "give(socket, start, end, microseconds to wait) -> (position, errno)"},
    {"digest", outbox_digest, METH_NOARGS, "digest() -> sum of all rows' digests"},
    {"size", outbox_size, METH_VARARGS, "size(start, end) -> bytes of all frames"},
    {0},
};
static PyMemberDef outbox_members[] = {
    {"waited", T_LONGLONG, offsetof(Outbox, waited), READONLY, "How many microseconds `give` has waited for room."},
    {0},
};
static PyType_Slot outbox_slots[] = {
    {Py_tp_doc, "Rows that are to be messages."},
    {Py_tp_new, outbox_new},
    {Py_tp_dealloc, outbox_dealloc},
    {Py_tp_methods, outbox_methods},
    {Py_tp_members, outbox_members},
    {0, NULL},
};
static PyType_Spec outbox_spec = {
    "zmq_datasource.transport._core.Outbox", sizeof(Outbox), 0, Py_TPFLAGS_DEFAULT, outbox_slots,
};

static PyMethodDef methods[] = {
    {"load", load, METH_O, "load(addresses): use these functions of libzmq"},
    {0},
};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_core", "Messages between libzmq and Arrow's buffers.", -1, methods, NULL, NULL, NULL, NULL,
};

static int add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    int added = type == NULL ? -1 : PyModule_AddObjectRef(module, name, type);
    Py_XDECREF(type);
    return added;
}

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *module = PyModule_Create(&module_definition);
    tee_type = (PyTypeObject *)PyType_FromSpec(&tee_spec); /* for as long as the process lives */
    if (module == NULL || tee_type == NULL || add_type(module, "Inbox", &inbox_spec) < 0 ||
        add_type(module, "Outbox", &outbox_spec) < 0 || PyModule_AddObjectRef(module, "Tee", (PyObject *)tee_type) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
