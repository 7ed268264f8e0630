/* Messages between libzmq and Arrow's buffers, many in one call and without the GIL.
 *
 * `Inbox.take` receives messages into buffers that Arrow can use as they are: the bytes of all frames one after the
 * other, where each frame ends, and how many frames each message has. `Outbox.give` sends rows of columns. Everything
 * else is Python: what a socket is, which messages fit, what becomes of a row that finds no room. core.py has the same
 * two in Python, and says what they mean.
 *
 * The rules:
 *
 * - libzmq is the one that pyzmq has loaded. `load` is given the addresses of its functions, and a call the pointer
 *   of a pyzmq socket, so nothing is linked and no header of libzmq is needed.
 * - While the GIL is released nothing of Python is touched but memory that this call holds: the inbox, which refuses a
 *   second call, and buffers that are exported to it.
 * - A message is taken or sent whole. One that cannot be taken (no memory, too large) leaves no trace in the buffers.
 * - No offset that comes from outside is trusted: all rows of an outbox are checked before the first of them is sent.
 * - Limited API of Python 3.11: one binary for it and all later releases.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DONTWAIT = 1, SNDMORE = 2, EVENTS = 15, SRCFD = 2 }; /* zmq.h */
enum { MOST_COLUMNS = 8 };

typedef struct {
    _Alignas(void *) unsigned char opaque[64];
} message_t; /* zmq_msg_t */

static struct {
    int (*msg_init)(message_t *);
    int (*msg_recv)(message_t *, void *, int);
    void *(*msg_data)(message_t *);
    size_t (*msg_size)(const message_t *);
    int (*msg_more)(const message_t *);
    int (*msg_get)(const message_t *, int);
    int (*msg_close)(message_t *);
    int (*send)(void *, const void *, size_t, int);
    int (*getsockopt)(void *, int, void *, size_t *);
    int (*error)(void);
} zmq;

/* The order in which `load` is given them. */
static void **const functions[] = {
    (void **)&zmq.msg_init, (void **)&zmq.msg_recv,  (void **)&zmq.msg_data, (void **)&zmq.msg_size,   (void **)&zmq.msg_more,
    (void **)&zmq.msg_get,  (void **)&zmq.msg_close, (void **)&zmq.send,     (void **)&zmq.getsockopt, (void **)&zmq.error,
};
enum { FUNCTIONS = sizeof functions / sizeof *functions };

static PyObject *load(PyObject *module, PyObject *addresses)
{
    (void)module;
    if (!PyTuple_Check(addresses) || PyTuple_Size(addresses) != FUNCTIONS)
        return PyErr_Format(PyExc_ValueError, "a tuple of %d addresses is needed", (int)FUNCTIONS);
    for (int i = 0; i < FUNCTIONS; i++) {
        void *address = PyLong_AsVoidPtr(PyTuple_GetItem(addresses, i));
        if (address == NULL)
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "address %d is null", i);
        *functions[i] = address;
    }
    Py_RETURN_NONE;
}

/* The pointer of a socket; NULL with an error set if it is none, or `load` was not called. */
static void *socket_of(PyObject *pointer)
{
    void *sock = PyLong_AsVoidPtr(pointer);
    if (sock == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "the socket is closed");
    if (sock != NULL && zmq.msg_init == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "load was not called");
        return NULL;
    }
    return sock;
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

/* Block: memory that was filled, for Arrow to read. */

typedef struct {
    PyObject_HEAD
    char *memory;
    size_t size, capacity;
} Block;

/* Memory for the next batch: what the system gives anew costs as much again as filling it, page by page. Touched only
 * while the GIL is held. */
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

static PyTypeObject *block_type;

static int block_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
    Block *block = (Block *)self;
    static char empty[1];
    return PyBuffer_FillInfo(view, self, block->memory ? block->memory : empty, (Py_ssize_t)block->size, 1, flags);
}

static void block_dealloc(PyObject *self)
{
    let_go(((Block *)self)->memory, ((Block *)self)->capacity);
    free_object(self);
}

static PyType_Slot block_slots[] = {
    {Py_tp_doc, "Memory that an inbox has filled; read through the buffer protocol."},
    {Py_bf_getbuffer, block_getbuffer},
    {Py_tp_dealloc, block_dealloc},
    {0, NULL},
};
static PyType_Spec block_spec = {
    "zmq_datasource.transport._core.Block", sizeof(Block), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, block_slots,
};

/* A buffer that grows. */

typedef struct {
    char *memory;
    size_t size, capacity; /* bytes */
} Growing;

static int reserve(Growing *buffer, size_t more)
{
    if (more <= buffer->capacity - buffer->size)
        return 0;
    size_t needed = buffer->size + more, doubled = buffer->capacity < 4096 ? 4096 : 2 * buffer->capacity;
    size_t capacity = needed > doubled ? needed : doubled;
    char *memory = realloc(buffer->memory, capacity);
    if (memory == NULL)
        return -1;
    buffer->memory = memory;
    buffer->capacity = capacity;
    return 0;
}

static void append(Growing *buffer, const void *content, size_t size)
{
    if (size) {
        memcpy(buffer->memory + buffer->size, content, size);
        buffer->size += size;
    }
}

static int append_offset(Growing *buffer, size_t offset)
{
    int32_t value = (int32_t)offset;
    if (reserve(buffer, sizeof value) < 0)
        return -1;
    append(buffer, &value, sizeof value);
    return 0;
}

/* What was filled as a Block; the buffer starts anew. */
static PyObject *hand_over(Growing *buffer)
{
    Block *block = (Block *)new_object(block_type);
    if (block == NULL)
        return NULL;
    if (buffer->size < buffer->capacity / 4) { /* a few bytes do not hold what many need next time */
        block->memory = malloc(buffer->size + 1);
        if (block->memory == NULL) {
            Py_DECREF((PyObject *)block);
            return PyErr_NoMemory();
        }
        memcpy(block->memory, buffer->memory, buffer->size);
        block->size = block->capacity = buffer->size;
        buffer->size = 0;
        if (buffer->capacity <= MOST_SPARE_BYTES)
            return (PyObject *)block;
        free(buffer->memory);
    } else {
        block->memory = buffer->memory;
        block->size = buffer->size;
        block->capacity = buffer->capacity;
    }
    *buffer = (Growing){0};
    return (PyObject *)block;
}

/* Inbox: messages that were taken and not handed over. */

typedef struct {
    PyObject_HEAD
    Growing data, frames, messages; /* both offsets begin with a 0 */
    int origin, busy;
} Inbox;

static Py_ssize_t count_of(const Growing *offsets)
{
    return offsets->size ? (Py_ssize_t)(offsets->size / sizeof(int32_t)) - 1 : 0;
}

static int begin(Inbox *inbox)
{
    if (inbox->messages.size)
        return 0;
    for (int i = 0; i < MOST_SPARE && inbox->data.memory == NULL; i++) {
        inbox->data.memory = spare[i].memory;
        inbox->data.capacity = spare[i].capacity;
        spare[i].memory = NULL;
    }
    inbox->frames.size = 0;
    return append_offset(&inbox->frames, 0) < 0 || append_offset(&inbox->messages, 0) < 0 ? -1 : 0;
}

typedef struct {
    int error;     /* why nothing was taken; 0 if a message was */
    size_t excess; /* the size of a message that was discarded because it is too large */
} Outcome;

/* One message. What can go wrong goes wrong before the buffers show it. */
static Outcome take_one(Inbox *inbox, void *sock, int flags, size_t largest, int with_origin)
{
    Growing *data = &inbox->data, *frames = &inbox->frames;
    size_t data_before = data->size, frames_before = frames->size, size = 0;
    int error = 0, more = 1, first = 1;
    for (; more; first = 0) {
        message_t frame;
        int received;
        zmq.msg_init(&frame);
        do /* a message arrives whole: only its first frame is waited for */
            received = zmq.msg_recv(&frame, sock, first ? flags : DONTWAIT);
        while (received < 0 && !first && zmq.error() == EINTR);
        if (received < 0) {
            error = zmq.error();
            zmq.msg_close(&frame);
            break;
        }
        size_t length = zmq.msg_size(&frame);
        size += length;
        if (!error && size <= largest) {
            if (data->size + length > INT32_MAX || reserve(data, length) < 0)
                error = ENOMEM;
            else {
                append(data, zmq.msg_data(&frame), length);
                if (append_offset(frames, data->size) < 0)
                    error = ENOMEM;
            }
        }
        more = zmq.msg_more(&frame);
        if (!more && with_origin)
            inbox->origin = zmq.msg_get(&frame, SRCFD);
        zmq.msg_close(&frame);
    }
    if (!error && size <= largest && append_offset(&inbox->messages, (size_t)count_of(frames)) < 0)
        error = ENOMEM;
    if (error || size > largest) {
        data->size = data_before;
        frames->size = frames_before;
    }
    return (Outcome){error, size > largest ? size : 0};
}

static PyObject *inbox_take(PyObject *self, PyObject *args)
{
    Inbox *inbox = (Inbox *)self;
    PyObject *pointer;
    Py_ssize_t most, room, largest;
    int wait, error = 0;
    if (!PyArg_ParseTuple(args, "Onnnp:take", &pointer, &most, &room, &largest, &wait))
        return NULL;
    void *sock = socket_of(pointer);
    if (sock == NULL)
        return NULL;
    if (inbox->busy)
        return PyErr_Format(PyExc_RuntimeError, "another thread is using this inbox");
    if (begin(inbox) < 0)
        return PyErr_NoMemory();
    Py_ssize_t before = count_of(&inbox->messages);
    size_t start = inbox->data.size, excess = 0;
    inbox->busy = 1;
    for (;;) {
        Py_BEGIN_ALLOW_THREADS
        Py_ssize_t taken = count_of(&inbox->messages) - before;
        for (error = 0; taken < most && (Py_ssize_t)(inbox->data.size - start) < room; taken++) {
            Outcome outcome = take_one(inbox, sock, wait && !taken ? 0 : DONTWAIT, (size_t)largest, most == 1);
            error = outcome.error;
            excess = outcome.excess;
            if (error || excess)
                break;
        }
        Py_END_ALLOW_THREADS
        if (error != EINTR)
            break;
        if (PyErr_CheckSignals() < 0) {
            inbox->busy = 0;
            return NULL;
        }
    }
    inbox->busy = 0;
    return Py_BuildValue("nni", count_of(&inbox->messages) - before, (Py_ssize_t)excess, error);
}

static PyObject *inbox_hand_over(PyObject *self, PyObject *nothing)
{
    Inbox *inbox = (Inbox *)self;
    (void)nothing;
    if (inbox->busy)
        return PyErr_Format(PyExc_RuntimeError, "another thread is using this inbox");
    if (begin(inbox) < 0)
        return PyErr_NoMemory();
    PyObject *data = hand_over(&inbox->data), *frames = hand_over(&inbox->frames), *messages = hand_over(&inbox->messages);
    if (data == NULL || frames == NULL || messages == NULL) {
        Py_XDECREF(data);
        Py_XDECREF(frames);
        Py_XDECREF(messages);
        return NULL;
    }
    return Py_BuildValue("NNN", data, frames, messages);
}

static PyObject *inbox_messages(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromSsize_t(count_of(&((Inbox *)self)->messages));
}

static PyObject *inbox_size(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromSize_t(((Inbox *)self)->data.size);
}

static PyObject *inbox_origin(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromLong(((Inbox *)self)->origin);
}

static PyObject *inbox_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    (void)names;
    if (!PyArg_ParseTuple(args, ":Inbox"))
        return NULL;
    return new_object(type); /* zeroed */
}

static void inbox_dealloc(PyObject *self)
{
    Inbox *inbox = (Inbox *)self;
    free(inbox->data.memory);
    free(inbox->frames.memory);
    free(inbox->messages.memory);
    free_object(self);
}

static PyMethodDef inbox_methods[] = {
    {"take", inbox_take, METH_VARARGS, "take(socket, most, room, largest, wait) -> (taken, excess, errno)"},
    {"hand_over", inbox_hand_over, METH_NOARGS, "hand_over() -> (data, frames, messages)"},
    {0},
};
static PyGetSetDef inbox_getset[] = {
    {"messages", inbox_messages, NULL, "How many messages it holds.", NULL},
    {"size", inbox_size, NULL, "The bytes of their frames.", NULL},
    {"origin", inbox_origin, NULL, "The descriptor of the connection that the last message came by, taken alone.", NULL},
    {0},
};
static PyType_Slot inbox_slots[] = {
    {Py_tp_doc, "Messages that were taken and not handed over."},
    {Py_tp_new, inbox_new},
    {Py_tp_dealloc, inbox_dealloc},
    {Py_tp_methods, inbox_methods},
    {Py_tp_getset, inbox_getset},
    {0, NULL},
};
static PyType_Spec inbox_spec = {
    "zmq_datasource.transport._core.Inbox", sizeof(Inbox), 0, Py_TPFLAGS_DEFAULT, inbox_slots,
};

/* Outbox: rows of columns that are to be messages. */

enum Kind { FRAME, SAME, NUMBER, FRAMES };

typedef struct {
    enum Kind kind;
    int wide;           /* whether offsets have 64 bits */
    int empty;          /* whether a null is an empty frame; else it is none */
    int64_t first;      /* where the column begins in its buffers; of NUMBER the number of row 0 */
    int64_t number;     /* FRAMES: what to put behind the first frame, for row 0; -1 for nothing */
    Py_buffer data, offsets, valid, lists;
} Column;

#define BUFFERS_OF(column) {&(column)->data, &(column)->offsets, &(column)->valid, &(column)->lists}

typedef struct {
    const char *content;
    size_t size;
} Frame;

/* Offset i of a column; -1 if there is none. */
static int64_t offset_at(const Column *column, int64_t i)
{
    const Py_buffer *offsets = &column->offsets;
    if (i < 0 || i >= offsets->len / (column->wide ? 8 : 4))
        return -1;
    return column->wide ? ((const int64_t *)offsets->buf)[i] : ((const int32_t *)offsets->buf)[i];
}

static int is_null(const Column *column, int64_t i)
{
    return column->valid.buf != NULL && !(((const uint8_t *)column->valid.buf)[i >> 3] >> (i & 7) & 1);
}

/* Element i of the bytes; false if it is outside of them. */
static int element(const Column *column, int64_t i, Frame *frame)
{
    int64_t begin = offset_at(column, i), end = offset_at(column, i + 1);
    if (begin < 0 || end < begin || end > column->data.len)
        return 0;
    frame->content = (const char *)column->data.buf + begin;
    frame->size = (size_t)(end - begin);
    return 1;
}

static void big_endian(uint64_t number, char out[8])
{
    for (int i = 7; i >= 0; i--, number >>= 8)
        out[i] = (char)(number & 0xff);
}

static int send_frame(void *sock, Frame frame, int flags)
{
    while (zmq.send(sock, frame.content, frame.size, flags) < 0) {
        int error = zmq.error();
        if (error != EINTR)
            return error;
    }
    return 0;
}

/* libzmq looks at its mailbox only now and then; asking for the events makes it look for room. */
static void refresh(void *sock)
{
    int events;
    size_t size = sizeof events;
    zmq.getsockopt(sock, EVENTS, &events, &size);
}

/* The first frame decides: once it is in, none of the others is refused. */
static int send_first(void *sock, Frame frame, int flags)
{
    if (zmq.send(sock, frame.content, frame.size, flags) >= 0)
        return 0;
    int error = zmq.error();
    if (error != EAGAIN || !(flags & DONTWAIT))
        return error;
    refresh(sock);
    return zmq.send(sock, frame.content, frame.size, flags) >= 0 ? 0 : zmq.error();
}

/* Passes the frames of a message on, one behind: only what follows tells whether more follow. */
typedef struct {
    void *sock; /* NULL: only count */
    int flags;  /* of the first frame */
    int count;
    int error;
    size_t size; /* of all frames */
    Frame last;
    char last_number[8];
} Message;

static void pass(Message *message)
{
    if (message->sock == NULL || message->error)
        return;
    message->error = message->count == 1 ? send_first(message->sock, message->last, message->flags | SNDMORE)
                                         : send_frame(message->sock, message->last, SNDMORE);
}

static void add_frame(Message *message, Frame frame)
{
    if (message->count)
        pass(message);
    message->count++;
    message->size += frame.size;
    message->last = frame;
}

static void add_number(Message *message, int64_t number)
{
    char bytes[8];
    big_endian((uint64_t)number, bytes);
    if (message->count)
        pass(message); /* before the number that it may be is overwritten */
    memcpy(message->last_number, bytes, 8);
    message->count++;
    message->size += 8;
    message->last = (Frame){message->last_number, 8};
}

/* Add what a column has of a row; false if the column does not reach there. */
static int add_row(Message *message, const Column *column, int64_t row)
{
    Frame frame;
    int64_t i = column->first + row;
    switch (column->kind) {
    case SAME:
        add_frame(message, (Frame){column->data.buf, (size_t)column->data.len});
        return 1;
    case NUMBER:
        add_number(message, i);
        return 1;
    case FRAME:
        if (i < 0 || (column->valid.buf != NULL && i >= 8 * column->valid.len))
            return 0;
        if (is_null(column, i)) {
            if (column->empty)
                add_frame(message, (Frame){"", 0});
            return 1;
        }
        if (!element(column, i, &frame))
            return 0;
        add_frame(message, frame);
        return 1;
    case FRAMES:
        if (i < 0 || i + 1 >= column->lists.len / 4)
            return 0;
        int64_t begin = ((const int32_t *)column->lists.buf)[i], end = ((const int32_t *)column->lists.buf)[i + 1];
        if (begin < 0 || end < begin)
            return 0;
        if (column->number >= 0 && end - begin <= 1) { /* a value alone: what stands for the topic is empty */
            add_frame(message, (Frame){"", 0});
            add_number(message, column->number + row);
        }
        for (int64_t at = begin; at < end; at++) {
            if (!element(column, at, &frame))
                return 0;
            add_frame(message, frame);
            if (column->number >= 0 && at == begin && end - begin > 1)
                add_number(message, column->number + row);
        }
        return 1;
    }
    return 0;
}

/* The first row that is not whole within its columns, or has no frame; `rows` if all are fine. */
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

static int give_one(void *sock, const Column *columns, int count, Py_ssize_t row, int flags)
{
    Message message = {.sock = sock, .flags = flags};
    for (int i = 0; i < count; i++)
        add_row(&message, &columns[i], row);
    if (message.error)
        return message.error;
    return message.count == 1 ? send_first(sock, message.last, flags) : send_frame(sock, message.last, 0);
}

static int as_column(PyObject *described, Column *column)
{
    PyObject *data, *offsets, *valid, *lists;
    int kind;
    long long first, number;
    if (!PyArg_ParseTuple(described, "iOOOOppLL", &kind, &data, &offsets, &valid, &lists, &column->wide, &column->empty, &first,
                          &number))
        return -1;
    column->kind = (enum Kind)kind;
    column->first = first;
    column->number = number;
    PyObject *given[] = {data, offsets, valid, lists};
    Py_buffer *held[] = BUFFERS_OF(column);
    for (int i = 0; i < 4; i++)
        if (given[i] != Py_None && PyObject_GetBuffer(given[i], held[i], PyBUF_SIMPLE) < 0)
            return -1;
    return 0;
}

typedef struct {
    PyObject_HEAD
    int count;
    Py_ssize_t rows;
    Column columns[MOST_COLUMNS];
} Outbox;

static void outbox_dealloc(PyObject *self)
{
    Outbox *outbox = (Outbox *)self;
    for (int i = 0; i < outbox->count; i++) {
        Py_buffer *held[] = BUFFERS_OF(&outbox->columns[i]);
        for (int j = 0; j < 4; j++)
            PyBuffer_Release(held[j]);
    }
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
    if (count < 1 || count > MOST_COLUMNS)
        return PyErr_Format(PyExc_ValueError, "%zd columns: 1 to %d are possible", count, (int)MOST_COLUMNS);
    Outbox *outbox = (Outbox *)new_object(type); /* zeroed, and so are its buffers: releasing them does nothing */
    if (outbox == NULL)
        return NULL;
    outbox->rows = rows;
    for (; outbox->count < count; outbox->count++)
        if (as_column(PyTuple_GetItem(described, outbox->count), &outbox->columns[outbox->count]) < 0) {
            outbox->count++;
            Py_DECREF(outbox);
            return NULL;
        }
    Py_BEGIN_ALLOW_THREADS
    row = check(outbox->columns, outbox->count, rows);
    Py_END_ALLOW_THREADS
    if (row < rows) {
        Py_DECREF(outbox);
        return PyErr_Format(PyExc_ValueError, "row %zd has no frame, or is not within its column", row);
    }
    return (PyObject *)outbox;
}

static PyObject *outbox_size(PyObject *self, PyObject *args)
{
    Outbox *outbox = (Outbox *)self;
    Py_ssize_t start, end, size = 0;
    if (!PyArg_ParseTuple(args, "nn:size", &start, &end))
        return NULL;
    if (start < 0 || end > outbox->rows)
        return PyErr_Format(PyExc_ValueError, "rows %zd to %zd of %zd", start, end, outbox->rows);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = start; row < end; row++) {
        Message message = {0};
        for (int i = 0; i < outbox->count; i++)
            add_row(&message, &outbox->columns[i], row);
        size += (Py_ssize_t)message.size;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromSsize_t(size);
}

static PyObject *outbox_give(PyObject *self, PyObject *args)
{
    Outbox *outbox = (Outbox *)self;
    PyObject *pointer;
    Py_ssize_t start, end, every;
    int wait, error = 0;
    if (!PyArg_ParseTuple(args, "Onnpn:give", &pointer, &start, &end, &wait, &every))
        return NULL;
    void *sock = socket_of(pointer);
    if (sock == NULL)
        return NULL;
    if (start < 0 || end > outbox->rows)
        return PyErr_Format(PyExc_ValueError, "rows %zd to %zd of %zd", start, end, outbox->rows);
    Py_ssize_t row = start;
    while (row < end) {
        Py_BEGIN_ALLOW_THREADS
        for (error = 0; row < end; row++) {
            if (every && (row - start) % every == 0)
                refresh(sock);
            error = give_one(sock, outbox->columns, outbox->count, row, wait ? 0 : DONTWAIT);
            if (error)
                break;
        }
        Py_END_ALLOW_THREADS
        if (error != EINTR)
            break;
        if (PyErr_CheckSignals() < 0)
            return NULL;
    }
    return Py_BuildValue("ni", row, error);
}

static PyMethodDef outbox_methods[] = {
    {"give", outbox_give, METH_VARARGS, "give(socket, start, end, wait, refresh) -> (position, errno)"},
    {"size", outbox_size, METH_VARARGS, "size(start, end) -> bytes"},
    {0},
};
static PyType_Slot outbox_slots[] = {
    {Py_tp_doc, "Rows that are to be messages."},
    {Py_tp_new, outbox_new},
    {Py_tp_dealloc, outbox_dealloc},
    {Py_tp_methods, outbox_methods},
    {0, NULL},
};
static PyType_Spec outbox_spec = {
    "zmq_datasource.transport._core.Outbox", sizeof(Outbox), 0, Py_TPFLAGS_DEFAULT, outbox_slots,
};

static PyMethodDef methods[] = {
    {"load", load, METH_O, "load(addresses): use these functions of libzmq"},
    {0},
};

static int fill(PyObject *module)
{
    block_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &block_spec, NULL);
    PyObject *inbox = PyType_FromModuleAndSpec(module, &inbox_spec, NULL);
    PyObject *outbox = PyType_FromModuleAndSpec(module, &outbox_spec, NULL);
    if (block_type == NULL || inbox == NULL || outbox == NULL || PyModule_AddObjectRef(module, "Inbox", inbox) < 0 ||
        PyModule_AddObjectRef(module, "Outbox", outbox) < 0)
        return -1;
    Py_DECREF(inbox);
    Py_DECREF(outbox);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_core", "Messages between libzmq and Arrow's buffers.", 0, methods, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module_definition);
}
